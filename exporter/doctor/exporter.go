package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/libdir"
)

// source returns the state of a source of the exporter; nil: there is no exporter, or it has not said.
func (h *Host) source(name string) *view.Source {
	if h.Snapshot != nil {
		for i := range h.Snapshot.Sources {
			if s := &h.Snapshot.Sources[i]; s.Name == name {
				return s
			}
		}
	}
	return nil
}

func (h *Host) up(name string) bool {
	s := h.source(name)
	return s != nil && s.Up
}

// traced tells whether the exporter's tracer runs.
func (h *Host) traced() bool {
	return h.Snapshot != nil && h.Snapshot.Tracer != nil && h.Snapshot.Tracer.Up
}

// meet reads what /proc says of this process, and parts with an exporter of another host: what it sees and what is here do not belong together.
func (h *Host) meet() {
	h.own = processes.ReadOwn(h.Proc)
	if h.Snapshot == nil {
		return
	}
	if id := h.Snapshot.Host.BootID; id != "" && h.own.BootID != "" && id != h.own.BootID {
		h.elsewhere = cmp.Or(h.Snapshot.Host.Name, "another host")
		h.Snapshot = nil
	} else if h.Snapshot.Host.Capabilities != "" {
		h.own.Capabilities = h.Snapshot.Host.Capabilities
	}
}

func (h *Host) exporter() []found {
	switch {
	case h.elsewhere != "":
		return wrong(otherHost, fmt.Sprintf("%s, and that is %s", h.From, h.elsewhere))
	case h.Snapshot == nil && h.Stranger:
		return wrong(stranger, h.Reason)
	case h.Snapshot == nil:
		return wrong(noExporter, h.Reason)
	case h.Now.Sub(h.Snapshot.Time) > staleAfter:
		return wrong(staleExporter, fmt.Sprintf("its snapshot is %.0f s old", h.Now.Sub(h.Snapshot.Time).Seconds()))
	}
	if h.Snapshot.Recorded {
		return wrong(recorded, h.From+", and serves a recording")
	}
	return fine(h.From)
}

func (h *Host) nvml() []found {
	if h.Snapshot == nil {
		return wrong(unknown, "not known without an exporter")
	}
	switch s := h.source(input.SourceNVML); {
	case s == nil:
		return wrong(noNVML, "it has not answered yet")
	case s.Up:
		return fine(fmt.Sprintf("version %s, GPUs: %d", h.Snapshot.Driver.NVMLVersion, len(h.Snapshot.Devices)))
	case strings.HasPrefix(s.Reason, "no usable libnvidia-ml"), strings.HasPrefix(s.Reason, "no glibc under"):
		evidence := s.Reason
		if strings.Contains(evidence, ": it is in none of ") {
			evidence += "; looked for by the loader and in " + strings.Join(libdir.Directories(), ", ")
		}
		return wrong(noLibrary, evidence)
	case strings.Contains(s.Reason, "driver is not loaded"):
		return wrong(notLoaded, s.Reason)
	case strings.Contains(s.Reason, "different versions"):
		return wrong(mismatch, s.Reason)
	default:
		return wrong(noNVML, s.Reason)
	}
}

// pids asks the exporter first: it may run in a container, and doctor beside it.
func (h *Host) pids() []found {
	reason := processes.Look(h.Proc).Reason()
	if s := h.source(input.SourceProcesses); s != nil {
		reason = s.Reason
	}
	switch kind, _, _ := strings.Cut(reason, ":"); processes.Visibility(kind) {
	case "":
		return fine("/proc shows the host's processes")
	case processes.PIDNamespace:
		return wrong(pidSpace, reason)
	case processes.Hangs:
		return wrong(stuck, reason)
	default:
		return wrong(hidden, reason)
	}
}

// needed are the capabilities that the exporter uses beyond those of any process.
var needed = []struct {
	name string
	bit  int
}{{"BPF", unix.CAP_BPF}, {"PERFMON", unix.CAP_PERFMON}, {"SYS_PTRACE", unix.CAP_SYS_PTRACE}, {"DAC_READ_SEARCH", unix.CAP_DAC_READ_SEARCH}}

// effective returns the exporter's effective ones as bits.
func (h *Host) effective() (bits uint64, ok bool) {
	bits, err := strconv.ParseUint(h.own.Capabilities, 16, 64)
	return bits, err == nil
}

func (h *Host) capabilities() []found {
	bits, ok := h.effective()
	if !ok {
		return wrong(unknown, "/proc does not tell")
	}
	var missing []string
	for _, c := range needed {
		// SYS_ADMIN stands for the first two.
		if bits>>c.bit&1 == 0 && !((c.bit == unix.CAP_BPF || c.bit == unix.CAP_PERFMON) && bits>>unix.CAP_SYS_ADMIN&1 != 0) {
			missing = append(missing, "CAP_"+c.name)
		}
	}
	if missing != nil {
		return wrong(noCaps, "not held: "+strings.Join(missing, ", "))
	}
	return fine("all that are used are held")
}

func (h *Host) kernel() (out []found) {
	if btf := filepath.Join(h.Sys, "kernel/btf/vmlinux"); !exists(btf) {
		out = append(out, found{noBTF, btf + " is not there"})
	}
	const file = "kernel/security/lockdown"
	text := cmp.Or(h.sysfs(file), read(h.DriverRoot, "sys", file)) // a container has no securityfs of its own
	if strings.Contains(text, "[confidentiality]") {
		out = append(out, found{lockdown, "lockdown: " + text})
	}
	if out == nil {
		return fine(fmt.Sprintf("%s with BTF, lockdown %s", cmp.Or(h.own.Kernel, "a kernel"), cmp.Or(text, "none")))
	}
	return out
}

func (h *Host) tracefs() []found {
	_, err := os.Stat(filepath.Join(h.Sys, "kernel/tracing/events"))
	switch bits, ok := h.effective(); {
	case err == nil:
		return fine("mounted")
	case h.traced():
		return fine("not mounted here; the exporter has it")
	case ok && bits>>unix.CAP_SYS_ADMIN&1 == 0:
		return wrong(noTracefs, fmt.Sprintf("%v, and CAP_SYS_ADMIN is not held", err))
	}
	return fine("not mounted; the exporter mounts it for itself")
}

func (h *Host) tracer() []found {
	switch {
	case h.Snapshot == nil || h.Snapshot.Tracer == nil:
		return wrong(unknown, "not known without an exporter")
	case !h.Snapshot.Tracer.Up:
		return wrong(tracerDown, h.Snapshot.Tracer.Reason)
	case h.Snapshot.Tracer.Reason != "":
		return fine("runs with " + h.Snapshot.Tracer.Mode + "; " + h.Snapshot.Tracer.Reason)
	}
	return fine("runs with " + h.Snapshot.Tracer.Mode)
}
