package docker

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/docker/docker/api/types/events"
)

func FuzzEvent(f *testing.F) {
	f.Add([]byte(`{"status":"start","id":"` + id("a") + `","from":"busybox","Type":"container","Action":"start","Actor":{"ID":"` + id("a") +
		`","Attributes":{"image":"busybox","name":"one"}},"scope":"local","time":1764597383,"timeNano":1764597383123456789}`))
	f.Add([]byte(`{"status":"die","id":"a","time":-1}`))
	f.Add([]byte(`{"Type":"container","Action":"exec_start: sh -c die","Actor":{"ID":"a"}}`))
	f.Add([]byte(`{"Type":"network","Action":"connect","Actor":{"ID":"a"}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m events.Message
		if json.Unmarshal(raw, &m) != nil {
			return
		}
		e, ok := decodeEvent(m)
		if !ok {
			return
		}
		if e.id == "" || e.action == "" || strings.Contains(e.action, ":") {
			t.Errorf("event %+v", e)
		}
		c := e.container()
		for _, s := range []string{c.ID, c.Name, c.Image, c.Project} {
			if !utf8.ValidString(s) || strings.ContainsAny(s, "\x00\n\x1b") {
				t.Errorf("unsafe text %q", s)
			}
		}
	})
}
