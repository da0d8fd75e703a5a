package processes

import (
	"os"
	"strings"
)

// Own is what /proc says about the running kernel and about this process. What cannot be read is empty.
type Own struct {
	Kernel       string // release, such as "6.18.5"
	BootID       string // of this boot of the host: the same in all of its containers
	Capabilities string // the effective ones, hexadecimal, as CapEff in /proc/self/status
}

// ReadOwn reads a /proc directory.
func ReadOwn(root string) Own {
	text := func(name string) string {
		b, _ := os.ReadFile(root + "/" + name)
		return strings.TrimSpace(string(b))
	}
	o := Own{Kernel: text("sys/kernel/osrelease"), BootID: text("sys/kernel/random/boot_id")}
	for line := range strings.Lines(text("self/status")) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			o.Capabilities = strings.TrimSpace(value)
		}
	}
	return o
}
