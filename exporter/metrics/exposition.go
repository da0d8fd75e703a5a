package metrics

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/snapshot"
)

// exposition is the series of one scrape, as client_golang has them. The next scrape uses it again: nearly all of its series are there with the
// same labels, so only values are written, and a scrape allocates next to nothing.
type exposition struct {
	families []*series // by name
	byName   map[string]*series
	list     []*dto.MetricFamily // what is given out
	scratch  []string            // of with
	text     *rows               // for the text formats; nil: for others

	most, sent, leftOut int  // series
	inOrder             bool // the bound cuts: see each
	errs                []error
}

// series are those of one family.
type series struct {
	*family
	labels  []string
	order   []int // of the labels by name
	metrics []*metric
	n       int // how many of them this scrape has so far
	out     *dto.MetricFamily

	// For the text formats.
	number        int    // of the family
	labelHash     uint64 // of the labels' names
	samples       []sample
	distributions []distribution
}

// metric is one of them, of a histogram all.
type metric struct {
	dto.Metric
	value float64             // of a counter
	of    *snapshot.Histogram // what the histogram was made of
}

func newExposition(o Options, inText bool) *exposition {
	e := &exposition{byName: map[string]*series{}, most: o.MaxSeries}
	if inText {
		e.text = &rows{}
	}
	for i := range families {
		f := &families[i]
		if o.Include != nil && !o.Include.MatchString(f.name) || o.Exclude != nil && o.Exclude.MatchString(f.name) {
			continue
		}
		labels := f.labels
		if o.ValueLabels && f.name == "gpu_utilization_percent" {
			labels = with(labels, valueLabels...)
		}
		e.add(f, labels)
	}
	for i := range bounds {
		e.add(&bounds[i], nil)
	}
	slices.SortFunc(e.families, func(x, y *series) int { return cmp.Compare(x.name, y.name) })
	return e
}

func (e *exposition) add(f *family, labels []string) {
	s := &series{family: f, labels: labels, number: len(e.families), out: &dto.MetricFamily{Name: &f.name, Help: &f.help, Type: f.kind().Enum()}}
	for i, name := range labels {
		s.order = append(s.order, i)
		s.labelHash = hash(s.labelHash, name)
	}
	slices.SortFunc(s.order, func(i, j int) int { return cmp.Compare(labels[i], labels[j]) })
	e.families = append(e.families, s)
	e.byName[f.name] = s
}

// begin forgets the series of the last scrape, but not what they are made of.
func (e *exposition) begin() {
	for _, s := range e.families {
		s.n, s.samples, s.distributions = 0, s.samples[:0], s.distributions[:0]
	}
	if e.text != nil {
		e.text.begin()
	}
	e.sent, e.leftOut, e.errs = 0, 0, nil
}

// with returns base and more. The next call overwrites the result, but for a base that is a result itself.
func (e *exposition) with(base []string, more ...string) []string {
	e.scratch = append(append(e.scratch[:0], base...), more...)
	return e.scratch
}

// take returns a family that gets n more series: nil where it is left out or the bound is reached.
func (e *exposition) take(name string, n int) *series {
	s := e.byName[name]
	if s == nil {
		return nil
	}
	if e.most > 0 && e.sent+n > e.most {
		e.leftOut += n
		return nil
	}
	e.sent += n
	return s
}

// next returns the next metric of a family, with its labels.
func (s *series) next(labels []string) *metric {
	if s.n == len(s.metrics) {
		s.metrics = append(s.metrics, s.blank())
	}
	m := s.metrics[s.n]
	s.n++
	for i, from := range s.order {
		if to := m.Label[i].Value; *to != labels[from] {
			*to = strings.ToValidUTF8(labels[from], "\uFFFD")
		}
	}
	return m
}

// blank makes a metric without values.
func (s *series) blank() *metric {
	m := &metric{}
	pairs, values := make([]dto.LabelPair, len(s.order)), make([]string, len(s.order))
	for i, from := range s.order {
		pairs[i].Name, pairs[i].Value = &s.labels[from], &values[i]
		m.Label = append(m.Label, &pairs[i])
	}
	switch s.kind() {
	case dto.MetricType_COUNTER:
		m.Counter = &dto.Counter{}
	case dto.MetricType_SUMMARY:
		m.Summary = &dto.Summary{SampleCount: new(uint64), SampleSum: new(float64)}
	case dto.MetricType_HISTOGRAM:
		m.Histogram = &dto.Histogram{SampleCount: new(uint64), SampleSum: new(float64)}
	default:
		m.Gauge = &dto.Gauge{Value: new(float64)}
	}
	return m
}

// put adds one series.
func (e *exposition) put(name string, v float64, labels ...string) {
	s := e.take(name, 1)
	if s == nil {
		return
	}
	if e.text != nil {
		if id, ok := e.row(s, labels); ok {
			s.samples = append(s.samples, sample{id, v})
		}
		return
	}
	if m := s.next(labels); m.Counter != nil {
		m.value = v
		m.Counter.Value = &m.value // which a scraper of its own may have replaced by 0
	} else {
		*m.Gauge.Value = v
	}
}

// summary adds a summary of a count and a sum: two series.
func (e *exposition) summary(name string, count uint64, sum float64, labels ...string) {
	s := e.take(name, 2)
	switch {
	case s == nil:
	case e.text != nil:
		e.distribution(s, nil, nil, count, sum, labels)
	default:
		m := s.next(labels)
		*m.Summary.SampleCount, *m.Summary.SampleSum = count, sum
	}
}

// buckets adds a classic histogram: a series per bucket, +Inf, sum and count. counts are cumulative, by bound.
func (e *exposition) buckets(name string, bounds []float64, counts []uint64, count uint64, sum float64, labels ...string) {
	s := e.take(name, len(bounds)+3)
	switch {
	case s == nil:
	case e.text != nil:
		e.distribution(s, bounds, counts, count, sum, labels)
	default:
		classic(s.next(labels).Histogram, bounds, counts, count, sum)
	}
}

// distribution adds a summary or a histogram to a text.
func (e *exposition) distribution(s *series, bounds []float64, counts []uint64, count uint64, sum float64, labels []string) {
	if id, ok := e.row(s, labels); ok {
		s.distributions = append(s.distributions, distribution{row: id, from: len(e.text.counts), bounds: bounds, count: count, sum: sum})
		e.text.counts = append(e.text.counts, counts...)
	}
}

// histogram adds a histogram of a snapshot in both forms: a server that negotiates protobuf gets the native one with the classic one.
func (e *exposition) histogram(name string, h *snapshot.Histogram, labels ...string) {
	if h == nil {
		return
	}
	s := e.take(name, len(h.Bounds)+3)
	if s == nil {
		return
	}
	var m *metric
	if e.text == nil {
		if m = s.next(labels); m.of == h {
			return
		}
		m.of = h
	}
	counts := slices.Clone(h.Buckets)
	for i := range counts[1:] {
		counts[i+1] += counts[i]
	}
	if e.text != nil {
		e.distribution(s, h.Bounds, counts[:len(h.Bounds)], h.Count, h.Sum, labels)
		return
	}
	if err := native(m.Histogram, h); err != nil {
		e.errs = append(e.errs, fmt.Errorf("%s: %w", name, err))
	}
	classic(m.Histogram, h.Bounds, counts, h.Count, h.Sum)
}

// finish gives out the families that have series, sorted. Of series with the same labels the first one counts; the error names the others.
func (e *exposition) finish() ([]*dto.MetricFamily, error) {
	e.list = e.list[:0]
	for _, s := range e.families {
		clear(s.metrics[s.n:]) // of a scrape that had more
		s.metrics = s.metrics[:s.n]
		if s.n == 0 {
			s.out.Metric = nil
			continue
		}
		slices.SortStableFunc(s.metrics, byLabels)
		s.out.Metric = s.out.Metric[:0]
		for i, m := range s.metrics {
			if i > 0 && byLabels(s.metrics[i-1], m) == 0 {
				e.errs = append(e.errs, fmt.Errorf("%s: twice with the same labels: %v", s.name, m.Label))
				continue
			}
			s.out.Metric = append(s.out.Metric, &m.Metric)
		}
		clear(s.out.Metric[len(s.out.Metric):cap(s.out.Metric)])
		e.list = append(e.list, s.out)
	}
	return e.list, errors.Join(e.errs...)
}

func byLabels(x, y *metric) int {
	for i, l := range x.Label {
		if c := strings.Compare(*l.Value, *y.Label[i].Value); c != 0 {
			return c
		}
	}
	return 0
}
