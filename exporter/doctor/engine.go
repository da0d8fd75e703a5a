package doctor

import (
	"cmp"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/view"
)

func (h *Host) docker() []found {
	reason := h.Engine.Reason
	if s := h.source(input.SourceDocker); reason == "" && s != nil && !s.Up {
		reason = "the exporter says: " + s.Reason
	}
	switch {
	case strings.Contains(reason, "no Docker here"):
		return wrong(noDocker, reason)
	case reason != "":
		return wrong(dockerDown, reason)
	}
	return fine("version " + h.Engine.Version + ", API " + h.Engine.API)
}

func (h *Host) runtime() (out []found) {
	var good []string
	for _, r := range h.Engine.Runtimes {
		if strings.Contains(r, "nvidia") {
			good = append(good, "runtime "+r)
		}
	}
	for _, dir := range []string{"usr/bin", "usr/local/bin"} { // Docker's --gpus needs the hook alone
		if path := h.file(dir + "/nvidia-container-runtime-hook"); exists(path) {
			good = append(good, path)
		}
	}
	directories := h.Engine.CDI
	if h.Engine.Reason != "" { // other engines look there too
		directories = []string{"/etc/cdi", "/var/run/cdi"}
	}
	module := h.module()
	for _, dir := range directories {
		// In a container the host's link from /var/run to /run would lead to the container's.
		if below, ok := strings.CutPrefix(dir, "/var/run/"); ok {
			dir = "/run/" + below
		}
		for _, path := range h.glob(filepath.Join(dir, "*")) {
			text := read(path)
			if !strings.Contains(text, "nvidia.com/") {
				continue
			}
			v := strings.TrimPrefix(cdiLibrary.FindString(text), "libcuda.so.")
			if module != "" && v != "" && v != module {
				out = append(out, found{oldCDI, fmt.Sprintf("%s is of version %s, the driver of %s", path, v, module)})
				continue
			}
			good = append(good, path)
		}
	}
	switch {
	case len(good) > 0:
		out = append(out, found{nil, few(good)})
	case out == nil && h.Engine.Reason != "":
		return wrong(unknown, "not known without Docker")
	case out == nil:
		return wrong(noRuntime, fmt.Sprintf("Docker's runtimes: %s; CDI directories, with nothing of nvidia.com: %s", few(h.Engine.Runtimes), few(directories)))
	}
	return out
}

var cdiLibrary = regexp.MustCompile(`libcuda\.so\.\d{3,}\.\d+(\.\d+)?`)

func (h *Host) cgroup() []found {
	kind := ""
	for line := range strings.Lines(h.proc("self/mounts")) {
		f := strings.Fields(line)
		switch {
		case len(f) > 3 && f[2] == "cgroup" && !strings.Contains(f[3], "name="): // a hierarchy that only has a name has no controllers
			kind = "version 1"
		case len(f) > 3 && f[2] == "cgroup2" && kind == "":
			kind = "version 2"
		}
	}
	if h.Engine.CgroupVersion != "" {
		kind = "version " + h.Engine.CgroupVersion
	}
	if kind == "" {
		return wrong(noCgroup, filepath.Join(h.Proc, "self/mounts")+" has none")
	}
	if h.Engine.CgroupDriver != "" {
		kind += ", Docker's driver " + h.Engine.CgroupDriver
	}
	if h.Engine.CgroupDriver != "systemd" || h.Snapshot == nil {
		return fine(kind)
	}
	var lacking, unseen []string
	for i := range h.Snapshot.Containers {
		c := &h.Snapshot.Containers[i]
		if len(c.Assigned) == 0 || strings.Contains(c.Request, "privileged") {
			continue
		}
		// What runc told systemd. It leaves out the nodes that NVIDIA's hook adds on its own, and those without a link in /dev/char.
		switch rules := read(h.file("run/systemd/transient/docker-"+c.ID+".scope.d"), "50-DeviceAllow.conf"); {
		case rules == "":
			unseen = append(unseen, name(c))
		case !strings.Contains(rules, "/dev/char/195:") && !strings.Contains(rules, "char-195") && !strings.Contains(rules, "char-nvidia"):
			lacking = append(lacking, name(c))
		}
	}
	switch {
	case lacking != nil:
		return wrong(reload, kind+", whose rules lack the GPUs of "+few(lacking))
	case unseen != nil:
		return wrong(unknown, kind+"; no rules in "+h.file("run/systemd/transient")+" for "+few(unseen))
	}
	return fine(kind)
}

// name is what people call a container.
func name(c *view.Container) string { return cmp.Or(c.Name, containers.ShortID(c.ID)) }

func (h *Host) access() (out []found) {
	if !h.traced() {
		return wrong(unknown, "not known without the tracer")
	}
	for i := range h.Snapshot.Containers {
		if c := &h.Snapshot.Containers[i]; !c.AccessLost.IsZero() {
			out = append(out, found{refused, fmt.Sprintf("container %s: /dev/nvidiactl refused, the last time %v ago; %d opens not permitted",
				name(c), max(0, h.Now.Sub(c.AccessLost)).Round(time.Second), c.RefusedOpens)})
		}
	}
	switch {
	case out != nil:
		return out
	case h.Sampled:
		return wrong(unknown, "nothing refused in a few seconds; an exporter that runs knows more")
	}
	return fine("no container has lost its device nodes")
}
