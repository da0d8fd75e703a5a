package containers

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// four is a host with four GPUs whose minors run against the index, one of them in two MIG devices.
var four = []GPU{
	{UUID: "GPU-8e11aaaa-0000-4000-8000-000000000000", Index: 0, Minor: 3, PCIBusID: "0000:0a:00.0"},
	{UUID: "GPU-8e22bbbb-0000-4000-8000-000000000001", Index: 1, Minor: 2, PCIBusID: "0000:0b:00.0"},
	{UUID: "GPU-9fccdddd-0000-4000-8000-000000000002", Index: 2, Minor: 1, PCIBusID: "0001:0a:00.0"},
	{UUID: "GPU-a0eeffff-0000-4000-8000-000000000003", Index: 3, Minor: 0, PCIBusID: "0000:c1:00.0", MIG: []MIG{
		{UUID: "MIG-1a2b0000-0000-5000-8000-00000000000a", Index: 0, GI: 7, CI: 0},
		{UUID: "MIG-1a2c0000-0000-5000-8000-00000000000b", Index: 1, GI: 9, CI: 0},
	}},
}

// got writes an assignment the short way: "0", or "3/1" for a MIG device, "@" and the source.
func got(as []Assignment) string {
	var texts []string
	for _, a := range as {
		text := "?"
		for _, g := range four {
			if g.UUID != a.UUID {
				continue
			}
			text = fmt.Sprint(g.Index)
			for _, m := range g.MIG {
				if m.UUID == a.MIG {
					text += "/" + fmt.Sprint(m.Index)
				}
			}
		}
		texts = append(texts, text+"@"+string(a.Source))
	}
	return strings.Join(texts, " ")
}

// TestRequests goes from what Docker's inspect says to the label gpu_request and the GPUs, for every way of giving a GPU.
func TestRequests(t *testing.T) {
	gpus := func(device string) string {
		return `{"HostConfig":{"Runtime":"runc","DeviceRequests":[{"Driver":"","Count":0,"DeviceIDs":[` + device + `],"Capabilities":[["gpu"]],"Options":{}}]}}`
	}
	count := func(n int) string {
		return fmt.Sprintf(`{"HostConfig":{"DeviceRequests":[{"Driver":"","Count":%d,"DeviceIDs":null,"Capabilities":[["gpu"]]}]}}`, n)
	}
	cdi := func(names string) string {
		return `{"HostConfig":{"DeviceRequests":[{"Driver":"cdi","Count":0,"DeviceIDs":[` + names + `],"Capabilities":null}]}}`
	}
	env := func(runtime string, vars ...string) string {
		list, err := json.Marshal(vars)
		if err != nil {
			t.Fatal(err)
		}
		return `{"Config":{"Env":` + string(list) + `},"HostConfig":{"Runtime":"` + runtime + `"}}`
	}
	nodes := func(paths ...string) string {
		var list []string
		for _, p := range paths {
			host, inside, ok := strings.Cut(p, ":")
			if !ok {
				inside = host
			}
			list = append(list, `{"PathOnHost":"`+host+`","PathInContainer":"`+inside+`","CgroupPermissions":"rwm"}`)
		}
		return `{"HostConfig":{"Devices":[` + strings.Join(list, ",") + `]}}`
	}
	mounts := func(names ...string) string {
		var list []string
		for _, n := range names {
			list = append(list, `{"Type":"bind","Source":"/dev/null","Destination":"`+n+`"}`)
		}
		return `{"Mounts":[` + strings.Join(list, ",") + `],"HostConfig":{"Runtime":"nvidia"},"Config":{"Env":["NVIDIA_VISIBLE_DEVICES=all"]}}`
	}
	const all4 = "0@device_requests 1@device_requests 2@device_requests 3@device_requests"
	tests := []struct {
		name       string
		inspect    string
		nodes      []int
		text       string
		want       string
		unresolved string
	}{
		{"nothing", `{"HostConfig":{"Runtime":"runc","DeviceRequests":null,"Devices":[]}}`, nil, "", "", ""},
		// --gpus
		{"all", count(-1), nil, "all", all4, ""},
		{"all, two nodes", count(-1), []int{0, 2}, "all", "1@device_requests 3@device_requests", ""},
		{"all, no node", count(-1), []int{}, "all", "", ""},
		{"count", count(2), nil, "count=2", "0@device_requests 1@device_requests", ""},
		{"count above", count(99), nil, "count=99", all4, ""},
		{"count huge", count(1 << 40), nil, fmt.Sprint("count=", 1<<40), all4, ""},
		{"count 0", count(0), nil, "", "", ""},
		{"index", gpus(`"1"`), nil, "device=1", "1@device_requests", ""},
		{"indexes", gpus(`"0","2"`), nil, "device=0,2", "0@device_requests 2@device_requests", ""},
		{"index twice", gpus(`"0","0"`), nil, "device=0", "0@device_requests", ""},
		{"index and UUID of the same", gpus(`"0","` + four[0].UUID + `"`), nil, "device=0," + four[0].UUID, "0@device_requests", ""},
		{"index not there", gpus(`"7"`), nil, "device=7", "", "7"},
		{"UUID", gpus(`"` + four[2].UUID + `"`), nil, "device=" + four[2].UUID, "2@device_requests", ""},
		{"UUID in upper case", gpus(`"` + strings.ToUpper(four[2].UUID) + `"`), nil, "device=" + strings.ToUpper(four[2].UUID), "2@device_requests", ""},
		{"UUID of another host", gpus(`"GPU-77777777-0000-4000-8000-000000000000"`), nil, "device=GPU-77777777-0000-4000-8000-000000000000", "", "GPU-77777777-0000-4000-8000-000000000000"},
		{"UUID prefix", gpus(`"GPU-9f"`), nil, "device=GPU-9f", "2@device_requests", ""},
		{"UUID prefix, ambiguous", gpus(`"GPU-8e"`), nil, "device=GPU-8e", "", "GPU-8e"},
		{"UUID prefix, empty", gpus(`"GPU-"`), nil, "device=GPU-", "", "GPU-"},
		{"MIG UUID", gpus(`"` + four[3].MIG[1].UUID + `"`), nil, "device=" + four[3].MIG[1].UUID, "3/1@device_requests", ""},
		{"MIG UUID prefix", gpus(`"MIG-1a2b"`), nil, "device=MIG-1a2b", "3/0@device_requests", ""},
		{"MIG UUID prefix, ambiguous", gpus(`"MIG-1a2"`), nil, "device=MIG-1a2", "", "MIG-1a2"},
		{"MIG, old form", gpus(`"MIG-` + four[3].UUID + `/9/0"`), nil, "device=MIG-" + four[3].UUID + "/9/0", "3/1@device_requests", ""},
		{"MIG, old form, not there", gpus(`"MIG-` + four[3].UUID + `/8/0"`), nil, "device=MIG-" + four[3].UUID + "/8/0", "", "MIG-" + four[3].UUID + "/8/0"},
		{"MIG, old form, broken", gpus(`"MIG-GPU-1//"`), nil, "device=MIG-GPU-1//", "", "MIG-GPU-1//"},
		{"MIG index", gpus(`"3:1"`), nil, "device=3:1", "3/1@device_requests", ""},
		{"MIG index, not there", gpus(`"0:0"`), nil, "device=0:0", "", "0:0"},
		{"PCI bus id", gpus(`"00000000:0B:00.0"`), nil, "device=00000000:0B:00.0", "1@device_requests", ""},
		{"PCI bus id, other domain", gpus(`"0001:0a:00.0"`), nil, "device=0001:0a:00.0", "2@device_requests", ""},
		{"all among devices", gpus(`"all"`), nil, "all", all4, ""},
		{"none among devices", gpus(`"none"`), nil, "", "", ""},
		{"two requests", `{"HostConfig":{"DeviceRequests":[{"DeviceIDs":["0"],"Capabilities":[["gpu"]]},{"Driver":"nvidia","DeviceIDs":["2"]}]}}`, nil,
			"device=0;device=2", "0@device_requests 2@device_requests", ""},
		{"driver nvidia", `{"HostConfig":{"DeviceRequests":[{"Driver":"nvidia","Count":-1,"Capabilities":[["utility","compute"]]}]}}`, nil, "all", all4, ""},
		{"another driver", `{"HostConfig":{"DeviceRequests":[{"Driver":"amd","Count":-1,"Capabilities":[["gpu"]]}]}}`, nil, "", "", ""},
		{"no GPU capability", `{"HostConfig":{"DeviceRequests":[{"Driver":"","Count":-1,"Capabilities":[["tpu"]]}]}}`, nil, "", "", ""},
		{"capabilities", `{"HostConfig":{"DeviceRequests":[{"Count":1,"Capabilities":[["tpu"],["gpu","nvidia","compute"]]}]}}`, nil, "count=1", "0@device_requests", ""},
		// CDI
		{"CDI index", cdi(`"nvidia.com/gpu=1"`), nil, "cdi:nvidia.com/gpu=1", "1@cdi", ""},
		{"CDI several", cdi(`"nvidia.com/gpu=1","nvidia.com/gpu=gpu2"`), nil, "cdi:nvidia.com/gpu=1,nvidia.com/gpu=gpu2", "1@cdi 2@cdi", ""},
		{"CDI all", cdi(`"nvidia.com/gpu=all"`), []int{3}, "cdi:nvidia.com/gpu=all", "0@cdi", ""},
		{"CDI UUID", cdi(`"nvidia.com/gpu=` + four[1].UUID + `"`), nil, "cdi:nvidia.com/gpu=" + four[1].UUID, "1@cdi", ""},
		{"CDI MIG index", cdi(`"nvidia.com/gpu=3:0"`), nil, "cdi:nvidia.com/gpu=3:0", "3/0@cdi", ""},
		{"CDI MIG by type", cdi(`"nvidia.com/gpu=mig3:1"`), nil, "cdi:nvidia.com/gpu=mig3:1", "3/1@cdi", ""},
		{"CDI runtime", cdi(`"runtime.nvidia.com/gpu=0"`), nil, "cdi:runtime.nvidia.com/gpu=0", "0@cdi", ""},
		{"CDI device plugin", cdi(`"k8s.device-plugin.nvidia.com/gpu=` + four[0].UUID + `"`), nil, "cdi:k8s.device-plugin.nvidia.com/gpu=" + four[0].UUID, "0@cdi", ""},
		{"CDI of another vendor", cdi(`"vendor.com/net=0","amd.com/gpu=0","evilnvidia.com/gpu=0","nvidia.com/pgpu=0","nvidia.com/gpu","nvidia.com/gpu="`), nil, "", "", ""},
		{"CDI not there", cdi(`"nvidia.com/gpu=9"`), nil, "cdi:nvidia.com/gpu=9", "", "9"},
		{"CDI as a device (Podman)", nodes("nvidia.com/gpu=2"), nil, "cdi:nvidia.com/gpu=2", "2@cdi", ""},
		// NVIDIA_VISIBLE_DEVICES
		{"env all", env("nvidia", "PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"), []int{1}, "env:all", "2@env", ""},
		{"env list", env("nvidia", "NVIDIA_VISIBLE_DEVICES=0, 2"), nil, "env:0,2", "0@env 2@env", ""},
		{"env UUID", env("nvidia", "NVIDIA_VISIBLE_DEVICES="+four[1].UUID), nil, "env:" + four[1].UUID, "1@env", ""},
		{"env MIG", env("nvidia", "NVIDIA_VISIBLE_DEVICES="+four[3].MIG[0].UUID), nil, "env:" + four[3].MIG[0].UUID, "3/0@env", ""},
		{"env MIG index", env("nvidia", "NVIDIA_VISIBLE_DEVICES=3:0"), nil, "env:3:0", "3/0@env", ""},
		{"env CDI", env("nvidia", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=1"), nil, "env:nvidia.com/gpu=1", "1@env", ""},
		{"env CDI all", env("nvidia", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=all"), []int{0}, "env:nvidia.com/gpu=all", "3@env", ""},
		{"env none", env("nvidia", "NVIDIA_VISIBLE_DEVICES=none"), nil, "", "", ""},
		{"env void", env("nvidia", "NVIDIA_VISIBLE_DEVICES=void"), nil, "", "", ""},
		{"env empty", env("nvidia", "NVIDIA_VISIBLE_DEVICES="), nil, "", "", ""},
		{"env not set", env("nvidia"), nil, "", "", ""},
		{"env, last one counts", env("nvidia", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=1"), nil, "env:1", "1@env", ""},
		{"env baked into the image", env("runc", "NVIDIA_VISIBLE_DEVICES=all", "CUDA_VERSION=12.8"), nil, "", "", ""},
		{"env, runtime of another name", env("nvidia-cdi", "NVIDIA_VISIBLE_DEVICES=0"), nil, "env:0", "0@env", ""},
		{"first CUDA images", env("nvidia", "CUDA_VERSION=8.0"), nil, "env:all", "0@env 1@env 2@env 3@env", ""},
		{"later CUDA images", env("nvidia", "CUDA_VERSION=9.0", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"), nil, "", "", ""},
		{"mounts", mounts(mountRoot+"0", mountRoot+four[2].UUID, "/data"), nil, "env:0," + four[2].UUID, "0@env 2@env", ""},
		{"mounts CDI", mounts(mountRoot + "cdi/nvidia.com/gpu/1"), nil, "env:nvidia.com/gpu=1", "1@env", ""},
		{"gpus outweigh env", `{"Config":{"Env":["NVIDIA_VISIBLE_DEVICES=all"]},"HostConfig":{"Runtime":"nvidia","DeviceRequests":[{"DeviceIDs":["1"],"Capabilities":[["gpu"]]}]}}`,
			nil, "device=1", "1@device_requests", ""},
		// nodes
		{"node", nodes("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"), nil, "node:/dev/nvidia0", "3@device_node", ""},
		{"nodes", nodes("/dev/nvidia0", "/dev/nvidia3"), []int{0, 3}, "node:/dev/nvidia0,/dev/nvidia3", "3@device_node 0@device_node", ""},
		{"node under another name", nodes("/dev/nvidia3:/dev/nvidia0"), []int{3}, "node:/dev/nvidia3", "0@device_node", ""},
		{"node made elsewhere", nodes("/tmp/x/nvidia0:/dev/nvidia0"), []int{0}, "node:/tmp/x/nvidia0", "3@device_node", ""},
		{"node of no GPU", nodes("/dev/nvidia9"), nil, "node:/dev/nvidia9", "", "/dev/nvidia9"},
		{"node that is not inside", nodes("/dev/nvidia0"), []int{1}, "node:/dev/nvidia0", "", "/dev/nvidia0"},
		{"other devices", nodes("/dev/fuse", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dri/card0"), nil, "", "", ""},
		{"all of /dev", nodes("/dev"), []int{0, 1}, "node:/dev", "2@device_node 3@device_node", ""},
		{"privileged", `{"HostConfig":{"Privileged":true}}`, []int{2, 3}, "privileged", "0@device_node 1@device_node", ""},
		{"privileged, nodes unknown", `{"HostConfig":{"Privileged":true}}`, nil, "privileged", "0@device_node 1@device_node 2@device_node 3@device_node", ""},
		{"privileged and gpus", `{"HostConfig":{"Privileged":true,"DeviceRequests":[{"DeviceIDs":["1"],"Capabilities":[["gpu"]]}]}}`, []int{2, 3},
			"device=1;privileged", "1@device_requests 0@device_node", ""},
		// hostile
		{"control characters", gpus(`"0\u001b[31m"`), nil, "device=0\ufffd[31m", "", "0\ufffd[31m"},
		{"negative", gpus(`"-1"`), nil, "device=-1", "", "-1"},
		{"huge index", gpus(`"99999999999999999999"`), nil, "device=99999999999999999999", "", "99999999999999999999"},
		{"wrong types", `{"HostConfig":{"Runtime":7,"DeviceRequests":"x","Privileged":"yes","Devices":3},"Config":{"Env":"x"}}`, nil, "", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			raw := `{"Id":"` + outer + `",` + strings.TrimPrefix(tt.inspect, "{")
			c, _, err := FromInspect([]byte(raw))
			if err != nil {
				t.Fatal(err)
			}
			c.Nodes = tt.nodes
			if c.RequestText() != tt.text {
				t.Errorf("request %q, want %q", c.RequestText(), tt.text)
			}
			as, unresolved := ResolveAll(c, four)
			if got(as) != tt.want {
				t.Errorf("assigned %q, want %q", got(as), tt.want)
			}
			if u := strings.Join(unresolved, " "); u != tt.unresolved {
				t.Errorf("unresolved %q, want %q", u, tt.unresolved)
			}
			if !reflect.DeepEqual(Resolve(c, four), as) {
				t.Error("Resolve and ResolveAll differ")
			}
		})
	}
}

// TestResolveUnknownMinor covers hosts without /dev/nvidiaN, such as WSL: what cannot be checked is believed.
func TestResolveUnknownMinor(t *testing.T) {
	c := Container{Requests: []Request{{Source: SourceDeviceRequests, All: true}}, Nodes: []int{}}
	if as := Resolve(c, []GPU{{UUID: "GPU-1", Minor: -1}}); len(as) != 1 {
		t.Errorf("assigned %v", as)
	}
	if as := Resolve(c, nil); as != nil {
		t.Errorf("assigned %v without a GPU", as)
	}
}

// TestFromInspect reads answers of real engines, and sees that nothing of the environment is kept.
func TestFromInspect(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("testdata", "inspect-20.10.json"))
	if err != nil {
		t.Fatal(err)
	}
	c, running, err := FromInspect(raw)
	if err != nil || !running {
		t.Fatalf("running %v, error %v", running, err)
	}
	if c.Name != "trainer" || c.Image != "busybox" || len(c.ID) != 64 || !strings.HasPrefix(c.ImageID, "sha256:") || c.Runtime != "nvidia" ||
		c.Project != "lab" || c.Service != "train" || c.PID <= 0 || c.Started.IsZero() || c.RequestText() != "device=0,GPU-8e;privileged" {
		t.Errorf("container %+v", c)
	}
	if c.ShortID() != c.ID[:12] || ShortID("short") != "short" {
		t.Errorf("short id %q", c.ShortID())
	}
	if !strings.Contains(string(raw), "hunter2") {
		t.Fatal("the fixture has no secret")
	}
	kept, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var in Inspect
	if err := json.Unmarshal(raw, &in); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(kept)+fmt.Sprintf("%+v", in.Config.Env), "hunter2") {
		t.Error("a secret of the environment was kept")
	}
	for name, text := range map[string]string{
		"empty": "", "half": string(raw[:len(raw)/2]), "no JSON": "<html>", "null": "null", "no id": "{}", "list": "[]",
	} {
		if _, _, err := FromInspect([]byte(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for name, state := range map[string]string{
		"exited": `"Running":false,"Pid":0`, "restarting": `"Running":true,"Restarting":true,"Pid":0`, "no pid": `"Running":true`,
		"negative pid": `"Running":true,"Pid":-3`,
	} {
		if _, running, err := FromInspect([]byte(`{"Id":"1","State":{` + state + `}}`)); running || err != nil {
			t.Errorf("%s: running %v, error %v", name, running, err)
		}
	}
	if _, running, _ := FromInspect([]byte(`{"Id":"1","State":{"Running":true,"Paused":true,"Pid":3}}`)); !running {
		t.Error("a paused container is a running one")
	}
}

func TestEqual(t *testing.T) {
	a := Container{ID: "1", Requests: []Request{{Text: "all", IDs: []string{"0"}}}, Nodes: []int{}}
	if !a.Equal(a) {
		t.Error("not equal to itself")
	}
	v := reflect.ValueOf(&a).Elem()
	for i := range v.NumField() { // a field that Equal forgets would never be emitted when it changes
		b := a
		f := reflect.ValueOf(&b).Elem().Field(i)
		switch f.Kind() {
		case reflect.String:
			f.SetString("other")
		case reflect.Int:
			f.SetInt(7)
		case reflect.Slice:
			f.SetZero()
		case reflect.Struct:
			b.Started = b.Started.Add(1)
		default:
			t.Fatalf("field %s has a kind that this test does not know", v.Type().Field(i).Name)
		}
		if a.Equal(b) {
			t.Errorf("equal although %s differs", v.Type().Field(i).Name)
		}
	}
}

func FuzzInspect(f *testing.F) {
	raw, err := os.ReadFile(filepath.Join("testdata", "inspect-20.10.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte(`{"Id":"1","HostConfig":{"Devices":[{"PathOnHost":"/dev/nvidia0"}],"DeviceRequests":[{"Count":-1,"Capabilities":[["gpu"]]}]}}`))
	f.Add([]byte(`{"Id":"1","Config":{"Env":["NVIDIA_VISIBLE_DEVICES=0:1,MIG-GPU-1/2/3,GPU-8e"]},"HostConfig":{"Runtime":"nvidia"},"Mounts":[{"Destination":"/x"}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, _, err := FromInspect(raw)
		if err != nil {
			return
		}
		for _, s := range []string{c.ID, c.Name, c.Image, c.Runtime, c.Project, c.Pod, c.RequestText()} {
			if !utf8.ValidString(s) || strings.ContainsAny(s, "\x00\n\x1b") {
				t.Errorf("unsafe text %q", s)
			}
		}
		checkResolve(t, c)
	})
}

func FuzzDevices(f *testing.F) {
	for _, s := range []string{"all", "0,1", "GPU-8e", "MIG-1", "MIG-GPU-1/2/3", "0:1", "nvidia.com/gpu=0", "none", "/dev/nvidia0", "0000:0a:00.0", "::", "mig-gpu-"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		ids := strings.Split(list, ",")
		var devices []InspectDevice
		for _, id := range ids {
			devices = append(devices, InspectDevice{PathOnHost: id, PathInContainer: id})
		}
		in := Inspect{ID: "1", HostConfig: InspectHostConfig{Runtime: "nvidia", Devices: devices,
			DeviceRequests: []InspectDeviceRequest{{Driver: "nvidia", DeviceIDs: ids}, {Driver: "cdi", DeviceIDs: ids}}}}
		checkResolve(t, New(in))
		in.HostConfig.DeviceRequests = nil
		in.Config.Env = GPUEnv{VisibleDevices: list, HasVisible: true}
		checkResolve(t, New(in))
	})
}

// checkResolve sees that only GPUs of the host are assigned, each once.
func checkResolve(t *testing.T, c Container) {
	t.Helper()
	seen := map[Assignment]bool{}
	for _, a := range Resolve(c, four) {
		key := Assignment{UUID: a.UUID, MIG: a.MIG}
		if strings.Contains(got([]Assignment{a}), "?") || seen[key] || a.Source == "" {
			t.Errorf("assignment %+v", a)
		}
		seen[key] = true
	}
}
