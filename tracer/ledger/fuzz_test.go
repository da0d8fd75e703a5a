package ledger

import "testing"

// FuzzLedger applies events made from bytes. Whatever they are: never more than was allocated (so never below zero either, the sums
// being unsigned), the sums of the parts are the whole, and nothing is left after every exit.
func FuzzLedger(f *testing.F) {
	f.Add([]byte{1, 1, 9, 9, 9, 0, 2, 1, 9, 9, 2, 0, 5, 1, 9, 2, 10, 4, 6, 1, 9, 0, 10, 0})
	f.Add([]byte{5, 1, 3, 2, 10, 4, 5, 1, 3, 10, 11, 4, 5, 1, 3, 11, 10, 4, 6, 1, 3, 0, 10, 0})
	f.Add([]byte{5, 1, 3, 2, 10, 4, 2, 1, 3, 3, 2, 7, 8, 1, 3, 0, 0, 1, 9, 1, 3, 0, 2, 2, 15, 1, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		l := New(Config{MaxObjects: 50})
		l.SetGPUs([]GPU{{ID: 1, Minor: 0, UUID: gpuA}, {ID: 2, Minor: 1, UUID: gpuB}})
		var allocated uint64
		for now := int64(1); len(data) >= 6; data, now = data[6:], now+1 {
			b := data[:6]
			e := Event{
				Kind: Kind(b[0] % 20), PID: int32(b[1] % 4), TID: int32(b[5] % 3), Client: uint32(b[2] % 4), Parent: uint32(b[3] % 12),
				Handle: uint32(b[4] % 12), Size: uint64(b[5]) << 20, Time: now * 1e9, Entry: now*1e9 - int64(b[5]), File: uint64(b[5] % 4),
				Start: uint64(b[5] % 3), Instance: uint32(b[5] % 3), GPUID: uint32(b[4] % 3), Minor: int32(b[4] % 3), UUID: UUID{b[5] % 3},
				SrcClient: uint32(b[5] / 3 % 4), SrcHandle: uint32(b[1] / 4 % 12),
			}
			if b[0] >= 200 {
				e.Status = StatusNoMemory
			}
			if e.Kind == Memory && Succeeded(e.Status) {
				allocated += e.Size
			}
			l.Apply(e)
			check(t, l, allocated)
		}
		empty(t, l)
	})
}

func check(t *testing.T, l *Ledger, allocated uint64) {
	t.Helper()
	var held uint64
	objects := 0
	for handle, c := range l.clients {
		objects += 1 + len(c.objects)
		if l.processes[c.owner.pid] != c.owner || c.owner.clients[handle] != c {
			t.Fatal("a client without its process")
		}
	}
	for pid, p := range l.processes {
		used, _ := l.Used(pid)
		var sum uint64
		for handle := range p.clients {
			sum += l.Held(handle, handle)
		}
		if used != sum {
			t.Fatalf("process %d: accounts say %d, objects %d", pid, used, sum)
		}
		held += used
		perGPU := map[UUID]uint64{}
		for _, c := range p.clients {
			perGPU[c.root.gpu] += c.root.size
			for _, o := range c.objects {
				if o.kind == Device {
					perGPU[o.gpu] += o.size
				}
			}
		}
		for gpu, a := range p.accounts {
			if a.used != perGPU[gpu] {
				t.Fatalf("process %d, GPU %x: account %d, devices %d", pid, gpu, a.used, perGPU[gpu])
			}
		}
	}
	if held > allocated {
		t.Fatalf("%d bytes held of %d allocated", held, allocated)
	}
	if objects != l.objects || objects > l.config.MaxObjects {
		t.Fatalf("%d objects, counted %d", objects, l.objects)
	}
}
