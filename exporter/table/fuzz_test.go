package table

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"gpu-exporter/exporter/view"
)

// FuzzView gives `ps` and `top` what an exporter that lies might answer: each line is one line of graphic characters.
func FuzzView(f *testing.F) {
	b, err := json.Marshal(sample())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b, 80)
	f.Add([]byte(`{"devices":[{"uuid":"\u001b[2J","memory_used_bytes":-1e308}],"workloads":[{"gpu_device_uuid":"x","process_pid":-1,"command":"\u202e"}]}`), 1)
	f.Add([]byte(`{"devices":null,"workloads":[{}]}`), -5)
	f.Fuzz(func(t *testing.T, raw []byte, width int) {
		var s view.Snapshot
		if json.Unmarshal(raw, &s) != nil {
			return
		}
		rows := Rows(&s, "gpu", "")
		for _, lines := range [][]string{Devices(&s, nil).Lines(width % 1000), Processes(rows, now, nil).Lines(width % 1000), Processes(Tree(rows, "mem"), now, nil).Lines(0)} {
			for _, line := range lines {
				if i := strings.IndexFunc(line, func(r rune) bool { return !unicode.IsGraphic(r) }); i >= 0 {
					t.Errorf("not graphic at %d: %q", i, line)
				}
			}
		}
	})
}
