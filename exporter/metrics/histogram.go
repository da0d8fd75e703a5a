package metrics

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/snapshot"
)

// histogram is a histogram of a snapshot in both forms: a server that negotiates protobuf gets the native one with the classic one.
type histogram struct {
	prometheus.Metric // classic
	native            prometheus.Metric
}

func newHistogram(d *prometheus.Desc, h *snapshot.Histogram, labels []string) (prometheus.Metric, error) {
	buckets := make(map[float64]uint64, len(h.Bounds))
	var sum uint64
	for i, le := range h.Bounds {
		sum += h.Buckets[i]
		buckets[le] = sum
	}
	classic, err := prometheus.NewConstHistogram(d, h.Count, h.Sum, buckets, labels...)
	if err != nil {
		return nil, err
	}
	// No other value than 0 is in the zero bucket.
	native, err := prometheus.NewConstNativeHistogram(d, h.Count, h.Sum, h.Native, nil, h.Zero, snapshot.NativeSchema, math.Ldexp(1, -128), time.Time{}, labels...)
	return histogram{classic, native}, err
}

// Write implements prometheus.Metric.
func (h histogram) Write(out *dto.Metric) error {
	if err := h.native.Write(out); err != nil {
		return err
	}
	var classic dto.Metric
	if err := h.Metric.Write(&classic); err != nil {
		return err
	}
	out.Histogram.Bucket = classic.Histogram.Bucket
	out.Histogram.CreatedTimestamp = nil // not known: the exporter's start is not the driver's
	return nil
}
