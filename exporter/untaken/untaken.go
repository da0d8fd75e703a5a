// Package untaken bounds what answers take of memory while slow readers have not read them.
package untaken

import (
	"errors"
	"sync"
	"sync/atomic"
)

// Err says that there was no room for an answer.
var Err = errors.New("too much that others have not read yet: try again later")

// Bound lets one answer be made at a time, and none while others of Most bytes are being written: so there are Most bytes and one answer at most.
type Bound struct {
	Most int64

	making sync.Mutex
	bytes  atomic.Int64
}

// Make lets an answer be made and returns taken, which is to be called when it was written, or was not. answer makes it and tells its size; its error is
// returned. Without room answer is not called, and the error is Err.
func (b *Bound) Make(answer func() (bytes int, err error)) (taken func(), err error) {
	b.making.Lock()
	defer b.making.Unlock()
	if b.bytes.Load() >= b.Most {
		return func() {}, Err
	}
	n, err := answer()
	b.bytes.Add(int64(n))
	return func() { b.bytes.Add(-int64(n)) }, err
}
