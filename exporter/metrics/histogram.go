package metrics

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/snapshot"
)

// classic writes the buckets of a histogram that has bounds.
func classic(h *dto.Histogram, bounds []float64, counts []uint64, count uint64, sum float64) {
	*h.SampleCount, *h.SampleSum = count, sum
	for len(h.Bucket) < len(bounds) {
		h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: new(float64), CumulativeCount: new(uint64)})
	}
	h.Bucket = h.Bucket[:len(bounds)]
	for i, b := range h.Bucket {
		*b.UpperBound, *b.CumulativeCount = bounds[i], counts[i]
	}
}

var nativeDesc = prometheus.NewDesc("native", "", nil, nil)

// native writes the exponential buckets of a native histogram.
func native(out *dto.Histogram, h *snapshot.Histogram) error {
	// No other value than 0 is in the zero bucket.
	m, err := prometheus.NewConstNativeHistogram(nativeDesc, h.Count, h.Sum, h.Native, nil, h.Zero, snapshot.NativeSchema, math.Ldexp(1, -128), time.Time{})
	if err != nil {
		return err
	}
	var made dto.Metric
	if err := m.Write(&made); err != nil {
		return err
	}
	n := made.Histogram
	out.Schema, out.ZeroThreshold, out.ZeroCount, out.PositiveSpan, out.PositiveDelta = n.Schema, n.ZeroThreshold, n.ZeroCount, n.PositiveSpan, n.PositiveDelta
	return nil
}
