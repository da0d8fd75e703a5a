package entries

import (
	"os"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
)

// hashMap makes a hash map as the kernel side has them, with n entries of the keys 0 to n-1, each its key's double.
func hashMap(t *testing.T, size, n uint32) *ebpf.Map {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: size})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	for k := range n {
		if err := m.Put(k, uint64(2*k)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// TestReader reads a map while others put and delete entries: what is there all the time is given once, however small the reads are.
func TestReader(t *testing.T) {
	const stay, churn = 3000, 1000
	for _, n := range []int{1, size} {
		m := hashMap(t, 4096, stay)
		r := Reader[uint32, uint64]{Map: m, keys: make([]uint32, n), values: make([]uint64, n)}
		stop := make(chan struct{})
		var others sync.WaitGroup
		others.Go(func() {
			for i := uint32(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				_ = m.Put(stay+i%churn, uint64(0))
				_ = m.Delete(stay + (i+churn/2)%churn) // not there yet is as good
			}
		})
		for range 20 {
			given := map[uint32]int{}
			if err := r.Each(func(k uint32, v *uint64) {
				given[k]++
				if k < stay && *v != uint64(2*k) {
					t.Errorf("read of %d: entry %d is %d", n, k, *v)
				}
			}); err != nil {
				t.Fatalf("read of %d: %v", n, err)
			}
			for k := range uint32(stay) {
				if given[k] != 1 {
					t.Fatalf("read of %d: entry %d was given %d times", n, k, given[k])
				}
			}
		}
		close(stop)
		others.Wait()
		r.Drop(func(k uint32) bool { return k%2 == 1 })
		left := 0
		if err := r.Each(func(k uint32, _ *uint64) {
			left++
			if k%2 == 1 {
				t.Errorf("read of %d: entry %d is left", n, k)
			}
		}); err != nil || left < stay/2 {
			t.Errorf("read of %d: %d left, %v", n, left, err)
		}
	}
}
