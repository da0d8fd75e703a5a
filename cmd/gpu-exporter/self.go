package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// selfPeriod is how often the exporter looks at itself.
const selfPeriod = 10 * time.Second

// self serves what other collectors said of this process within the last ten seconds. Collecting that reads a dozen files of /proc and the
// Go runtime's statistics, which took half of a scrape; and a scrape reads no /proc.
type self struct {
	collectors []prometheus.Collector
	latest     atomic.Pointer[[]prometheus.Metric]
}

func newSelf(c ...prometheus.Collector) *self {
	s := &self{collectors: c}
	s.refresh()
	return s
}

// run refreshes until ctx ends.
func (s *self) run(ctx context.Context) {
	tick := time.NewTicker(selfPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.refresh()
		}
	}
}

func (s *self) refresh() {
	out := make(chan prometheus.Metric)
	go func() {
		defer close(out)
		for _, c := range s.collectors {
			c.Collect(out)
		}
	}()
	var list []prometheus.Metric
	for m := range out {
		list = append(list, m)
	}
	s.latest.Store(&list)
}

// Describe implements prometheus.Collector.
func (s *self) Describe(out chan<- *prometheus.Desc) {
	for _, c := range s.collectors {
		c.Describe(out)
	}
}

// Collect implements prometheus.Collector.
func (s *self) Collect(out chan<- prometheus.Metric) {
	for _, m := range *s.latest.Load() {
		out <- m
	}
}
