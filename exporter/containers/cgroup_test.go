package containers

import (
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	outer = "3b9d2f3c0a6e5c1d4f7b8a9e0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69788776"
	inner = "f00dfeedf00dfeedf00dfeedf00dfeedf00dfeedf00dfeedf00dfeedf00dfeed"
	pod   = "8a2f1c3e-5b7d-4e9f-a1b2-c3d4e5f60718"
)

var slicePod = "pod" + strings.ReplaceAll(pod, "-", "_")

// cgroupTests are lines as they are on real hosts, with other ids.
var cgroupTests = []struct {
	name string
	text string
	want []string
}{
	// Docker
	{"v2 cgroupfs", "0::/docker/" + outer + "\n", []string{outer}},
	{"v2 systemd", "0::/system.slice/docker-" + outer + ".scope\n", []string{outer}},
	{"v2 own cgroup namespace", "0::/../" + outer + "\n", []string{outer}},
	{"v2 own cgroup namespace, systemd", "0::/../docker-" + outer + ".scope\n", []string{outer}},
	{"v1", "12:hugetlb:/docker/" + outer + "\n11:cpu,cpuacct:/docker/" + outer + "\n1:name=systemd:/docker/" + outer + "\n", []string{outer}},
	{"v1 systemd", "4:memory:/system.slice/docker-" + outer + ".scope\n1:name=systemd:/system.slice/docker-" + outer + ".scope\n", []string{outer}},
	{"hybrid", "9:name=systemd:/docker/" + outer + "\n4:memory:/docker/" + outer + "\n0::/system.slice/docker.service\n", []string{outer}},
	{"hybrid, one controller elsewhere", "9:name=systemd:/\n5:devices:/docker/" + outer + "\n4:memory:/process_api/7b83890f10101b3805f4ad67e43922f1\n0::/\n", []string{outer}},
	{"cgroup parent", "0::/teams/ml/" + outer + "\n", []string{outer}},
	{"slice as parent", "0::/gpu.slice/gpu-jobs.slice/docker-" + outer + ".scope\n", []string{outer}},
	{"rootless systemd", "0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-" + outer + ".scope\n", []string{outer}},
	{"rootless cgroupfs", "0::/user.slice/user-1000.slice/user@1000.service/docker.service/docker/" + outer + "\n", []string{outer}},
	{"systemd inside", "0::/docker/" + outer + "/init.scope\n", []string{outer}},
	{"service inside", "0::/docker/" + outer + "/system.slice/nginx.service\n", []string{outer}},
	{"Docker Desktop", "0::/docker/" + outer + "\n", []string{outer}},
	{"snap", "0::/system.slice/snap.docker.dockerd.service/docker/" + outer + "\n", []string{outer}},
	{"group deleted", "0::/docker/" + outer + " (deleted)\n", []string{outer}},
	{"ECS", "9:perf_event:/ecs/task-with-name/1f2e3d4c5b6a/" + outer + "\n", []string{outer}},
	{"AWS Batch", "0::/ecstasks.slice/ecstasks-1f2e3d4c.slice/docker-" + outer + ".scope\n", []string{outer}},
	// nested
	{"Docker in Docker", "0::/docker/" + outer + "/docker/" + inner + "\n", []string{outer, inner}},
	{"Docker in Docker, v1", "4:memory:/docker/" + outer + "/docker/" + inner + "\n0::/docker/" + outer + "\n", []string{outer, inner}},
	{"Docker in LXC", "0::/lxc/100/ns/docker/" + outer + "\n", []string{outer}},
	{"kind", "0::/docker/" + outer + "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-" + slicePod +
		".slice/cri-containerd-" + inner + ".scope\n", []string{outer, inner}},
	{"the same id twice", "0::/docker/" + outer + "/" + outer + "\n", []string{outer}},
	// Kubernetes
	{"guaranteed, cgroupfs", "11:memory:/kubepods/pod" + pod + "/" + outer + "\n", []string{outer}},
	{"burstable, cgroupfs", "0::/kubepods/burstable/pod" + pod + "/" + outer + "\n", []string{outer}},
	{"besteffort, cgroupfs", "0::/kubepods/besteffort/pod" + pod + "/" + outer + "\n", []string{outer}},
	{"guaranteed, systemd", "0::/kubepods.slice/kubepods-" + slicePod + ".slice/cri-containerd-" + outer + ".scope\n", []string{outer}},
	{"burstable, systemd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-" + slicePod + ".slice/cri-containerd-" + outer + ".scope\n", []string{outer}},
	{"besteffort, docker", "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-" + slicePod + ".slice/docker-" + outer + ".scope\n", []string{outer}},
	{"CRI-O", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-" + slicePod + ".slice/crio-" + outer + ".scope\n", []string{outer}},
	{"CRI-O container group", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-" + slicePod + ".slice/crio-" + outer + ".scope/container\n", []string{outer}},
	{"CRI-O conmon", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-" + slicePod + ".slice/crio-conmon-" + outer + ".scope\n", nil},
	{"containerd with colons", "11:cpu,cpuacct:/system.slice/containerd.service/kubepods-burstable-" + slicePod + ".slice:cri-containerd:" + outer + "\n", []string{outer}},
	{"containerd k8s.io", "0::/k8s.io/" + outer + "\n", []string{outer}},
	{"nerdctl", "0::/default/" + outer + "\n", []string{outer}},
	{"nerdctl systemd", "0::/system.slice/nerdctl-" + outer + ".scope\n", []string{outer}},
	{"static pod", "0::/kubepods/burstable/podcdcd6f6a7c6b5a4f3e2d1c0b9a897867/" + outer + "\n", []string{outer}},
	// Podman
	{"podman", "0::/machine.slice/libpod-" + outer + ".scope\n", []string{outer}},
	{"podman container group", "0::/machine.slice/libpod-" + outer + ".scope/container\n", []string{outer}},
	{"podman rootless", "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + outer + ".scope/container\n", []string{outer}},
	{"podman cgroupfs", "0::/libpod_parent/libpod-" + outer + "\n", []string{outer}},
	{"podman conmon", "0::/machine.slice/libpod-conmon-" + outer + ".scope\n", nil},
	{"podman conmon, cgroupfs", "0::/libpod_parent/" + outer + "/conmon\n", nil},
	{"podman split", "0::/system.slice/web.service/libpod-payload-" + outer + "\n", []string{outer}},
	{"podman split supervisor", "0::/system.slice/web.service/supervisor\n", nil},
	{"podman in a pod", "0::/machine.slice/machine-libpod_pod_" + inner + ".slice/libpod-" + outer + ".scope/container\n", []string{inner, outer}},
	// parts of the content
	{"a path", "/docker/" + outer, []string{outer}},
	{"a component", outer, []string{outer}},
	{"a component with scope", "docker-" + outer + ".scope", []string{outer}},
	{"a component with colons", "kubepods-" + slicePod + ".slice:cri-containerd:" + outer, []string{outer}},
	// none
	{"root", "0::/\n", nil},
	{"empty", "", nil},
	{"session", "0::/user.slice/user-1000.slice/session-3.scope\n", nil},
	{"service", "0::/system.slice/docker.service\n", nil},
	{"LXC", "0::/lxc.payload.web/system.slice/nginx.service\n", nil},
	{"LXC v1", "4:memory:/lxc/web\n", nil},
	{"systemd-nspawn", "0::/machine.slice/systemd-nspawn@web.service/payload\n", nil},
	{"buildkit", "0::/docker/buildkit/q2u9s7k3l1m5n8p0r4t6v2w1x\n", nil},
	{"32 digits", "4:memory:/process_api/7b83890f10101b3805f4ad67e43922f1\n", nil},
	{"63 digits", "0::/docker/" + outer[1:] + "\n", nil},
	{"65 digits", "0::/docker/a" + outer + "\n", nil},
	{"upper case", "0::/docker/" + strings.ToUpper(outer) + "\n", nil},
	{"no hex", "0::/docker/" + outer[:63] + "g\n", nil},
	{"supervisor in a container", "0::/docker/" + outer + "/crio-conmon-" + inner + ".scope\n", []string{outer}},
	{"garbage", "\x00\xff:::/\n\n::", nil},
}

// TestIDs is the table of every cgroup layout: outermost id first, and FromCgroup the innermost.
func TestIDs(t *testing.T) {
	for _, tt := range cgroupTests {
		t.Run(tt.name, func(t *testing.T) {
			if got := IDs(tt.text); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("IDs(%q) = %v, want %v", tt.text, got, tt.want)
			}
			last := ""
			if len(tt.want) > 0 {
				last = tt.want[len(tt.want)-1]
			}
			if got := FromCgroup(tt.text); got != last {
				t.Errorf("FromCgroup = %q, want %q", got, last)
			}
			if got := FromCgroup(CgroupPath(tt.text)); got != last {
				t.Errorf("FromCgroup of the path %q = %q, want %q", CgroupPath(tt.text), got, last)
			}
		})
	}
}

func TestCgroupPath(t *testing.T) {
	for text, want := range map[string]string{
		"9:name=systemd:/a\n0::/b\n":                    "/b",
		"9:name=systemd:/docker/" + outer + "\n0::/b\n": "/docker/" + outer,
		"0::/x:y\n": "/x:y",
		"4:memory:/docker/" + outer + " (deleted)\n": "/docker/" + outer,
		"2:cpu:/first\n1:memory:/second\n":           "/first",
		"":                                           "",
		"4:m:/docker/" + outer + "\n0::/docker/" + outer + "/s": "/docker/" + outer + "/s",
	} {
		if got := CgroupPath(text); got != want {
			t.Errorf("CgroupPath(%q) = %q, want %q", text, got, want)
		}
	}
}

// TestOwner sees that a nested container counts for the one that the host's engine knows.
func TestOwner(t *testing.T) {
	nested := "0::/docker/" + outer + "/docker/" + inner + "\n"
	for _, tt := range []struct {
		text  string
		known []string
		want  string
	}{
		{nested, []string{outer}, outer},
		{nested, []string{outer, inner}, inner},
		{nested, nil, inner},
		{"0::/\n", []string{outer}, ""},
	} {
		known := map[string]bool{}
		for _, id := range tt.known {
			known[id] = true
		}
		if got := Owner(tt.text, func(id string) bool { return known[id] }); got != tt.want {
			t.Errorf("Owner(%q, %v) = %q, want %q", tt.text, tt.known, got, tt.want)
		}
	}
}

func TestClean(t *testing.T) {
	for _, tt := range []struct {
		in    string
		limit int
		want  string
	}{
		{"plain name", 80, "plain name"},
		{"", 80, ""},
		{"ünïcödé 漢字 😀", 80, "ünïcödé 漢字 😀"},
		{"a\x00b\x1b[31mc\td\ne\x7f", 80, "a\ufffdb\ufffd[31mc\ufffdd\ufffde\ufffd"},
		{"\xff\xfe", 80, "\ufffd\ufffd"},
		{"right\u202eleft\u2028line\u200bzero", 80, "right\ufffdleft\ufffdline\ufffdzero"},
		{"äöüß", 2, "äö"},
		{"ab\xff", 2, "ab"},
		{"a\xff\xff\xff", 2, "a\ufffd"},
		{"x", 0, ""},
	} {
		if got := Clean(tt.in, tt.limit); got != tt.want {
			t.Errorf("Clean(%q, %d) = %q, want %q", tt.in, tt.limit, got, tt.want)
		}
	}
	for in, want := range map[string]string{"abc": "abc", "abcd": "abc…", "a\x1bc": "a\ufffdc", "": ""} {
		if got := Cut(in, 3); got != want {
			t.Errorf("Cut(%q, 3) = %q, want %q", in, got, want)
		}
	}
	if n := testing.AllocsPerRun(100, func() { Clean("vllm-server", 80) }); n != 0 {
		t.Errorf("%v allocations for a clean name", n)
	}
}

func FuzzCgroup(f *testing.F) {
	for _, tt := range cgroupTests {
		f.Add(tt.text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ids := IDs(text)
		for _, id := range ids {
			if len(id) != idLen || strings.Trim(id, "0123456789abcdef") != "" || !strings.Contains(text, id) {
				t.Errorf("id %q of %q", id, text)
			}
		}
		last := FromCgroup(text)
		if (last == "") != (len(ids) == 0) {
			t.Errorf("FromCgroup %q, IDs %v", last, ids)
		}
		if FromCgroup(CgroupPath(text)) == "" != (last == "") {
			t.Errorf("the path %q of %q has not its id", CgroupPath(text), text)
		}
		if owner := Owner(text, func(string) bool { return false }); owner != last {
			t.Errorf("Owner %q, FromCgroup %q", owner, last)
		}
	})
}

func FuzzClean(f *testing.F) {
	f.Add("name\x1b", 10)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit &= 1023
		got := Clean(s, limit)
		if !utf8.ValidString(got) || utf8.RuneCountInString(got) > limit {
			t.Errorf("Clean(%q, %d) = %q", s, limit, got)
		}
		for _, r := range got {
			if r != utf8.RuneError && !graphic(r) {
				t.Errorf("Clean(%q) lets %U pass", s, r)
			}
		}
		if Clean(got, limit) != got {
			t.Errorf("Clean is not stable on %q", got)
		}
	})
}
