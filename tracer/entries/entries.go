// Package entries reads hash maps of the kernel side, many entries with one system call.
package entries

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/cilium/ebpf"
)

// Reader reads one map, into buffers of its own. The kernel walks its buckets once, each of them locked: an entry that is there all the time is
// given once, whatever comes and goes meanwhile, and the walk ends. A kernel that has ring buffers has such reads (5.6 and 5.8). It is not safe for
// concurrent use.
type Reader[K comparable, V any] struct {
	Map *ebpf.Map

	keys   []K
	values []V
}

// size is how many entries are read with one system call.
const size = 64

// Each calls f for every entry. What it is given is the Reader's own.
func (r *Reader[K, V]) Each(f func(K, *V)) error {
	if r.keys == nil {
		r.keys, r.values = make([]K, size), make([]V, size)
	}
	var cursor ebpf.MapBatchCursor
	for {
		n, err := r.Map.BatchLookup(&cursor, r.keys, r.values, nil)
		if errors.Is(err, syscall.ENOSPC) && len(r.keys) < int(r.Map.MaxEntries()) { // the next bucket alone is larger
			r.keys, r.values = make([]K, 2*len(r.keys)), make([]V, 2*len(r.values))
			continue
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("reading map %s: %w", r.Map, err)
		}
		for i := range n {
			f(r.keys[i], &r.values[i])
		}
		if err != nil { // the end, with the last entries
			return nil
		}
	}
}

// Drop deletes the entries of the keys that are unwanted, of those that can be read.
func (r *Reader[K, V]) Drop(unwanted func(K) bool) {
	var keys []K
	_ = r.Each(func(k K, _ *V) { // what could not be read is dropped the next time
		if unwanted(k) {
			keys = append(keys, k)
		}
	})
	for _, k := range keys {
		_ = r.Map.Delete(k) // gone already is as good
	}
}
