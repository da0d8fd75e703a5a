package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/nvml/beat"
)

// selfPeriod is how often the exporter looks at itself.
const selfPeriod = 10 * time.Second

// self has what other collectors said of this process within the last ten seconds. Collecting that reads a dozen files of /proc and the Go
// runtime's statistics, which took half of a scrape; and a scrape reads no /proc.
type self struct {
	registry *prometheus.Registry
	latest   atomic.Pointer[[]*dto.MetricFamily]
}

func newSelf(c ...prometheus.Collector) *self {
	s := &self{registry: prometheus.NewRegistry()}
	s.registry.MustRegister(c...)
	s.refresh()
	return s
}

// run refreshes until ctx ends.
func (s *self) run(ctx context.Context) {
	tick := beat.New(selfPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.refresh()
			tick.Again()
		}
	}
}

func (s *self) refresh() {
	list, _ := s.registry.Gather() // what could not be collected is absent
	s.latest.Store(&list)
}

// families is metrics.Options.More.
func (s *self) families() []*dto.MetricFamily { return *s.latest.Load() }
