package docker

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNodes looks into the /dev of containers made by hand: nodes are known by device number, and no link leads out.
func TestNodes(t *testing.T) {
	node := func(t *testing.T, path string, major, minor uint32) {
		t.Helper()
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(major, minor))); err != nil {
			t.Fatalf("mknod %s: %v", path, err)
		}
	}
	for _, tt := range []struct {
		name string
		make func(t *testing.T, root string) // root is that of the container
		want []int
	}{
		{"all kinds", func(t *testing.T, root string) {
			dev := root + "/dev"
			mkdir(t, dev+"/nvidia-caps")
			node(t, dev+"/nvidia0", nvidiaMajor, 3)
			node(t, dev+"/nvidia7", nvidiaMajor, 1)
			node(t, dev+"/nvidia-again", nvidiaMajor, 3)
			node(t, dev+"/nvidiactl", nvidiaMajor, 255)
			node(t, dev+"/nvidia-modeset", nvidiaMajor, 254)
			node(t, dev+"/nvidia9", 1, 3)
			node(t, dev+"/other", nvidiaMajor, 5)
			write(t, dev+"/nvidia1")
			if err := os.Symlink("nvidia0", dev+"/nvidia2"); err != nil {
				t.Fatal(err)
			}
		}, []int{1, 3}},
		{"none", func(t *testing.T, root string) { mkdir(t, root+"/dev") }, []int{}},
		{"no dev", func(t *testing.T, root string) { mkdir(t, root) }, nil},
		{"dev leads out", func(t *testing.T, root string) {
			mkdir(t, root)
			out := t.TempDir()
			node(t, out+"/nvidia0", nvidiaMajor, 0)
			if err := os.Symlink(out, root+"/dev"); err != nil {
				t.Fatal(err)
			}
		}, nil},
		{"dev is a file", func(t *testing.T, root string) { mkdir(t, root); write(t, root+"/dev") }, nil},
		{"too many", func(t *testing.T, root string) {
			mkdir(t, root+"/dev")
			for i := range maxNames + 1 {
				if err := unix.Mknod(fmt.Sprint(root, "/dev/n", i), unix.S_IFIFO|0o600, 0); err != nil {
					t.Fatal(err)
				}
			}
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			proc := proc{root: t.TempDir()}
			tt.make(t, filepath.Join(proc.root, "7", "root"))
			if got := proc.nodes(7); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("nodes %#v, want %#v", got, tt.want)
			}
		})
	}
}

func mkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

// TestProcLook sees that a process that is not the container's says nothing about it.
func TestProcLook(t *testing.T) {
	p := proc{root: t.TempDir()}
	mkdir(t, p.root+"/7/root/dev")
	for name, text := range map[string]string{
		"stat": "7 (x) S 1 7 7 0 -1 4194560 1066 0 0 0 0 0 0 0 20 0 1 0 4711 9850880\n", "cgroup": "0::/docker/" + id("a") + "\n", "cmdline": "x",
	} {
		if err := os.WriteFile(p.root+"/7/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if start, nodes := p.look(t.Context(), 7, id("a")); start != 4711 || nodes == nil {
		t.Errorf("start %d, nodes %#v", start, nodes)
	}
	if start, nodes := p.look(t.Context(), 7, id("b")); start != 0 || nodes != nil {
		t.Errorf("another container: start %d, nodes %#v", start, nodes)
	}
	if start, nodes := p.look(t.Context(), 8, id("a")); start != 0 || nodes != nil {
		t.Errorf("no process: start %d, nodes %#v", start, nodes)
	}
	p.stuck.Store(maxStuck)
	if start, _ := p.look(t.Context(), 7, id("a")); start != 0 {
		t.Error("looks although as many hang as may")
	}
}

// TestDeathIsQuick sees that a death shows within 10 ms of its event.
func TestDeathIsQuick(t *testing.T) {
	f := newFake(t)
	s := watch(t, Config{Host: f.host})
	s.wait(t, 3*time.Second, "connected", up)
	var best time.Duration = time.Hour
	for i := range 20 {
		name := fmt.Sprint("c", i)
		f.start(name)
		s.wait(t, time.Second, "started", has(name))
		began := time.Now()
		f.die(name)
		s.wait(t, time.Second, "gone", hasNot(name))
		best = min(best, time.Since(began))
	}
	if best > 10*time.Millisecond {
		t.Errorf("a death takes %v to show", best)
	}
	if strings.Contains(s.logged(), "WARN") {
		t.Errorf("log:\n%s", s.logged())
	}
}
