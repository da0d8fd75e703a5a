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

// closed checks that the workloads of each device hold what the device says is in use, and returns on how many devices that was known.
func closed(t *testing.T, s *snapshot.Snapshot) (sums int) {
	t.Helper()
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
		if d.Load.MemoryUsed.OK {
			sums++
		}
	}
	return sums
}

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
		closed(t, s)
		for _, w := range s.Workloads {
			busy = busy || w.Container.Name == "trainer" && w.Utilization.V > 80
			hold = hold || w.Container.Name == "notebook" && w.Memory.V > 4<<30 && w.Utilization.OK && w.Utilization.V == 0
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

// TestTraced replays a minute of an H200 with the kernel tracer on (scripts/gpu-host-e2e): memory comes from kernel events and adds up, the
// container that copies has its bytes, and the exporter, its worker and the monitoring clients beside it are no workloads.
func TestTraced(t *testing.T) {
	file, err := os.Open("testdata/h200-traced.ndjson.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	list, err := Read(file)
	if err != nil {
		t.Fatal(err)
	}
	b := snapshot.NewBuilder(snapshot.Config{})
	var fed uint64
	pids, peaks, sums := map[int]bool{}, 0, 0
	for _, in := range list {
		b.Apply(in)
		s := b.Snapshot(time.Unix(0, in.Time))
		sums += closed(t, s)
		for _, w := range s.Workloads {
			if w.PID != 0 {
				pids[w.PID] = true
			}
			if w.Peak.OK {
				peaks++
			}
			if w.Container.Name == "feed" {
				if w.HtoD.V < fed {
					t.Fatalf("the bytes copied fell from %d to %d", fed, w.HtoD.V)
				}
				fed = w.HtoD.V
			}
		}
	}
	if len(pids) != 4 {
		t.Errorf("workloads %v, want the three containers and the process beside them", pids)
	}
	const tensor = 64 << 20 * 4 // bytes of each copy
	if fed == 0 || fed%tensor != 0 {
		t.Errorf("feed copied %d bytes to the device, want a multiple of %d", fed, tensor)
	}
	if peaks == 0 || sums < 100 {
		t.Errorf("%d peaks, %d sums", peaks, sums)
	}
}
