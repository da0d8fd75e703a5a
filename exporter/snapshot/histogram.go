package snapshot

import (
	"maps"
	"math"
	"slices"
)

// Histogram counts values from 0 up in given buckets and in the exponential ones of a native histogram.
type Histogram struct {
	Bounds  []float64 // upper bounds, ascending
	Buckets []uint64  // per bound, not cumulative; the last one is for what is above all bounds
	Native  map[int]int64
	Zero    uint64 // values of 0
	Count   uint64
	Sum     float64
}

// NativeSchema is the resolution of Histogram.Native: 8 buckets for each doubling. Bucket i ends at 2^(i/8).
const NativeSchema = 3

var (
	percentBounds = []float64{0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 100}
	wattBounds    = []float64{25, 50, 75, 100, 150, 200, 250, 300, 400, 500, 600, 700, 800, 1000, 1200}
)

// with returns a histogram that has the values too. A snapshot may still hold h, so h itself is not changed.
func (h *Histogram) with(bounds []float64, values []float64) *Histogram {
	if len(values) == 0 {
		return h
	}
	n := &Histogram{Bounds: bounds, Buckets: make([]uint64, len(bounds)+1), Native: map[int]int64{}}
	if h != nil {
		n.Buckets, n.Native, n.Zero, n.Count, n.Sum = slices.Clone(h.Buckets), maps.Clone(h.Native), h.Zero, h.Count, h.Sum
	}
	for _, v := range values {
		i, _ := slices.BinarySearch(bounds, v)
		n.Buckets[i]++
		n.Count++
		n.Sum += v
		if v == 0 {
			n.Zero++
		} else {
			n.Native[int(math.Ceil(math.Log2(v)*(1<<NativeSchema)))]++
		}
	}
	return n
}
