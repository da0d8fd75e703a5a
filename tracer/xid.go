package tracer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"gpu-exporter/tracer/tracefs"
)

// field is where a tracepoint's record has a value.
type field struct{ at, size uint32 }

// parseFormat reads the fields of a tracepoint's format file, by name.
func parseFormat(text string) map[string]field {
	fields := map[string]field{}
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "field:")
		if !ok {
			continue
		}
		parts := strings.Split(rest, ";")
		if len(parts) < 3 {
			continue
		}
		var f field
		words := strings.Fields(parts[0])
		_, err := fmt.Sscanf(strings.TrimSpace(parts[1])+" "+strings.TrimSpace(parts[2]), "offset:%d size:%d", &f.at, &f.size)
		if err == nil && len(words) > 0 {
			fields[words[len(words)-1]] = f
		}
	}
	return fields
}

// attachXid attaches to the driver's own tracepoint, where the driver has it.
func (k *kernel) attachXid() error {
	if k.xid != nil {
		return nil
	}
	return tracefs.Do(func() error {
		format, err := readFile(tracefs.Root + "/events/nvidia/nvidia_dev_xid/format")
		if errors.Is(err, os.ErrNotExist) {
			return nil // an older driver, or none
		}
		if err != nil {
			return fmt.Errorf("reading the form of Xid reports: %w", err)
		}
		fields := parseFormat(format)
		dev, code, msg := fields["dev"], fields["error_code"], fields["msg"]
		if dev.size != 4 || msg.size != 4 || code.size != 4 && code.size != 8 {
			return fmt.Errorf("reading the form of Xid reports: %v", fields)
		}
		spec, err := loadBpf()
		if err != nil {
			return fmt.Errorf("reading the programs: %w", err)
		}
		only(spec, []string{bpfProgOnXid})
		for name, value := range map[string]uint32{
			bpfVarXidDevAt: dev.at, bpfVarXidCodeAt: code.at, bpfVarXidCodeSize: code.size, bpfVarXidMsgAt: msg.at,
		} {
			if err := spec.Variables[name].Set(value); err != nil {
				return fmt.Errorf("setting up the Xid program: %w", err)
			}
		}
		xid, err := k.load(spec)
		if err != nil {
			return fmt.Errorf("loading the Xid program: %w", err)
		}
		if k.xidLink, err = link.Tracepoint("nvidia", "nvidia_dev_xid", xid.Programs[bpfProgOnXid], nil); err != nil {
			xid.Close()
			return fmt.Errorf("attaching to Xid reports: %w", err)
		}
		k.xid = xid
		return nil
	})
}

// detachXid undoes attachXid, so that the driver's module can be unloaded.
func (k *kernel) detachXid() {
	if k.xid != nil {
		_ = k.xidLink.Close() // the kernel detaches with the last descriptor
		k.xid.Close()
		k.xid = nil
	}
}

// load loads further programs, upon the maps of those that are loaded.
func (k *kernel) load(spec *ebpf.CollectionSpec) (*ebpf.Collection, error) {
	replace := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		if m := k.collection.Maps[name]; m != nil && !strings.HasPrefix(name, ".") {
			replace[name] = m
			spec.Maps[name].MaxEntries = m.MaxEntries()
		}
	}
	return ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replace})
}

// hasSymbols looks for functions of the kernel in the text of /proc/kallsyms.
func hasSymbols(symbols io.Reader, names ...string) map[string]bool {
	has := map[string]bool{}
	for lines := bufio.NewScanner(symbols); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) >= 3 && slices.Contains(names, fields[2]) {
			has[fields[2]] = true
		}
	}
	return has
}
