package recording

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
)

// TestDemo runs the real attribution over the built-in recording: a busy and a holding container share one GPU, and memory adds up throughout.
func TestDemo(t *testing.T) {
	if len(Demo) > 1<<20 {
		t.Fatalf("the demo has %d bytes", len(Demo))
	}
	list, err := Read(bytes.NewReader(Demo))
	if err != nil {
		t.Fatal(err)
	}
	b := snapshot.NewBuilder(snapshot.Config{})
	busy, hold := false, false
	for _, in := range list {
		b.Apply(in)
		s := b.Snapshot(time.Unix(0, in.Time))
		for i, d := range s.Devices {
			if d.Load == nil {
				continue
			}
			var sum uint64
			for _, w := range s.Workloads {
				if w.Device == i {
					sum += w.Memory.V
				}
			}
			if sum != d.Load.MemoryUsed.V {
				t.Fatalf("workloads hold %d, the device says %d", sum, d.Load.MemoryUsed.V)
			}
		}
		for _, w := range s.Workloads {
			busy = busy || w.Container.Name == "busy" && w.Utilization.V > 80
			hold = hold || w.Container.Name == "hold" && w.Memory.V > 4<<30 && w.Utilization.OK && w.Utilization.V == 0
		}
	}
	if !busy || !hold {
		t.Fatalf("busy container seen: %v, holding container seen: %v", busy, hold)
	}
}

// TestRoundTripAndCut: what was written is read, and a file cut in its middle is read up to there.
func TestRoundTripAndCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.gz")
	w, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		if err := w.Write(input.Input{Time: int64(i), Source: &input.Source{Name: "nvml", Up: i%2 == 0}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := Read(bytes.NewReader(whole)); err != nil || len(list) != 1000 {
		t.Fatalf("%d inputs, %v", len(list), err)
	}
	if list, err := Read(bytes.NewReader(whole[:len(whole)-20])); err != nil || len(list) == 0 || len(list) > 1000 {
		t.Fatalf("cut: %d inputs, %v", len(list), err)
	}
	if _, err := Read(bytes.NewReader([]byte("no recording"))); err == nil {
		t.Fatal("garbage was read")
	}
}
