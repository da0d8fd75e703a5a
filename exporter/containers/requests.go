package containers

import (
	"slices"
	"strings"
)

// mountRoot is where the nvidia runtime looks for devices that were asked for by mounting /dev/null on a path named after them.
const mountRoot = "/var/run/nvidia-container-devices/"

// Requests returns the ways in which a container asked for GPUs, in the order of preference: --gpus, CDI names, the nvidia
// runtime's environment variable or mounts, device nodes, --privileged. The variable counts only where the nvidia runtime reads
// it: CUDA images carry it baked in, whatever runtime they are started with. nil: no GPU asked for.
func Requests(in Inspect) []Request {
	var rs []Request
	for _, d := range in.HostConfig.DeviceRequests {
		if r, ok := deviceRequest(d); ok {
			rs = append(rs, r)
		}
	}
	// The CDI names among --device come in a request of their own from Docker 25 on; Podman lists them as devices.
	var cdi []string
	for _, d := range in.HostConfig.Devices {
		if _, ok := cdiDevice(d.PathOnHost); ok {
			cdi = append(cdi, d.PathOnHost)
		}
	}
	if r, ok := cdiRequest(cdi); ok {
		rs = append(rs, r)
	}
	// Docker replaces the variable when --gpus is given.
	gpus := slices.ContainsFunc(rs, func(r Request) bool { return r.Source == SourceDeviceRequests })
	if strings.Contains(in.HostConfig.Runtime, "nvidia") && !gpus {
		if r, ok := runtimeRequest(in); ok {
			rs = append(rs, r)
		}
	}
	if r, ok := nodeRequest(in.HostConfig.Devices); ok {
		rs = append(rs, r)
	}
	if in.HostConfig.Privileged {
		rs = append(rs, Request{Source: SourceDeviceNode, Text: "privileged", All: true})
	}
	return rs
}

// deviceRequest reads one HostConfig.DeviceRequests entry the way dockerd's nvidia driver does.
func deviceRequest(d InspectDeviceRequest) (Request, bool) {
	switch d.Driver {
	case "cdi":
		return cdiRequest(d.DeviceIDs)
	case "nvidia":
	case "":
		if !slices.ContainsFunc(d.Capabilities, func(set []string) bool {
			return slices.Contains(set, "gpu") || slices.Contains(set, "nvidia")
		}) {
			return Request{}, false
		}
	default:
		return Request{}, false
	}
	r := Request{Source: SourceDeviceRequests}
	switch {
	case len(d.DeviceIDs) > 0:
		ids, all := deviceList(d.DeviceIDs)
		if all {
			r.Text, r.All = "all", true
			break
		}
		if len(ids) == 0 {
			return Request{}, false
		}
		r.Text, r.IDs = requestText("device=", ids), ids
	case d.Count < 0:
		r.Text, r.All = "all", true
	case d.Count > 0:
		r.Text, r.Count = "count="+itoa(d.Count), d.Count
	default:
		return Request{}, false // --gpus 0
	}
	return r, true
}

// cdiRequest reads CDI device names.
func cdiRequest(names []string) (Request, bool) {
	r := Request{Source: SourceCDI}
	var texts []string
	for _, name := range names {
		id, ok := cdiDevice(name)
		if !ok || len(texts) == maxIDs {
			continue
		}
		texts = append(texts, Clean(name, maxText))
		if id == "all" {
			r.All = true
			continue
		}
		r.IDs = append(r.IDs, id)
	}
	if len(texts) == 0 {
		return Request{}, false
	}
	if r.All {
		r.IDs = nil
	}
	r.Text = requestText("cdi:", texts)
	return r, true
}

// cdiDevice returns the device of a qualified CDI name "vendor/class=device" whose vendor is NVIDIA and whose class is that of GPUs
// or MIG devices, as Request.IDs has it: "nvidia.com/gpu=0", "runtime.nvidia.com/gpu=all", "nvidia.com/gpu=mig0:1".
func cdiDevice(name string) (id string, ok bool) {
	kind, device, ok := strings.Cut(name, "=")
	if !ok || device == "" {
		return "", false
	}
	vendor, class, ok := strings.Cut(kind, "/")
	if !ok || vendor != "nvidia.com" && !strings.HasSuffix(vendor, ".nvidia.com") {
		return "", false
	}
	if class != "gpu" && !strings.HasPrefix(class, "mig") {
		return "", false
	}
	// The naming strategy type-index of nvidia-ctk puts the type before the index.
	for _, typ := range []string{"gpu", "mig"} {
		if rest, cut := strings.CutPrefix(device, typ); cut && rest != "" && strings.Trim(rest, "0123456789:") == "" {
			device = rest
		}
	}
	return Clean(device, maxText), true
}

// runtimeRequest reads what the nvidia runtime reads: mounts below mountRoot, else NVIDIA_VISIBLE_DEVICES.
func runtimeRequest(in Inspect) (Request, bool) {
	var list []string
	for _, m := range in.Mounts {
		if name, ok := strings.CutPrefix(m.Destination, mountRoot); ok && name != "" {
			if cdi, ok := strings.CutPrefix(name, "cdi/"); ok { // "cdi/nvidia.com/gpu/0"
				if i := strings.LastIndexByte(cdi, '/'); i > 0 {
					name = cdi[:i] + "=" + cdi[i+1:]
				}
			}
			list = append(list, name)
		}
	}
	env := in.Config.Env
	switch {
	case list != nil:
	case env.HasVisible:
		list = strings.Split(env.VisibleDevices, ",")
	case env.HasCUDAVersion && !env.HasRequireCUDA:
		list = []string{"all"} // the first CUDA images set no NVIDIA_VISIBLE_DEVICES and mean all
	}
	ids, all := deviceList(list)
	if all {
		return Request{Source: SourceEnv, Text: "env:all", All: true}, true
	}
	if len(ids) == 0 {
		return Request{}, false
	}
	text := requestText("env:", ids)
	for i, id := range ids {
		if device, ok := cdiDevice(id); ok {
			if device == "all" {
				return Request{Source: SourceEnv, Text: text, All: true}, true
			}
			ids[i] = device
		}
	}
	return Request{Source: SourceEnv, Text: text, IDs: ids}, true
}

// deviceList cleans a list of devices as nvidia-container-cli reads it: "all" wins, "none", "void" and nothing are none.
func deviceList(list []string) (ids []string, all bool) {
	for _, id := range list {
		switch id = strings.TrimSpace(id); id {
		case "all":
			return nil, true
		case "", "none", "void":
		default:
			if id = Clean(id, maxText); len(ids) < maxIDs && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	return ids, false
}

// nodeRequest reads the plain device nodes among --device.
func nodeRequest(devices []InspectDevice) (Request, bool) {
	var paths, inside []string
	r := Request{Source: SourceDeviceNode}
	for _, d := range devices {
		path := Clean(d.PathOnHost, maxText)
		switch {
		case len(paths) == maxIDs:
		case strings.TrimRight(path, "/") == "/dev":
			r.All = true
			paths = append(paths, path)
		case isGPUNode(path):
			paths, inside = append(paths, path), append(inside, path)
		case isGPUNode(d.PathInContainer): // a node made elsewhere, or under another name
			paths, inside = append(paths, path), append(inside, Clean(d.PathInContainer, maxText))
		}
	}
	if len(paths) == 0 {
		return Request{}, false
	}
	if !r.All {
		r.IDs = inside
	}
	r.Text = requestText("node:", paths)
	return r, true
}

// isGPUNode tells whether a path is named like the node of a GPU: /dev/nvidia and a number.
func isGPUNode(path string) bool {
	_, ok := nodeMinor(path)
	return ok
}

// nodeMinor returns N of /dev/nvidiaN.
func nodeMinor(path string) (int, bool) {
	number, ok := strings.CutPrefix(path, "/dev/nvidia")
	if !ok {
		return 0, false
	}
	return atoi(number)
}

func requestText(prefix string, list []string) string {
	return Clean(prefix+strings.Join(list, ","), maxText)
}
