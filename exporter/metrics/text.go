package metrics

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// rows is what an exposition has for the text formats. Thousands of processes have the same labels in a dozen families each: such labels are a row,
// written once, and a series is a row and a value. With client_golang's types for each series a host of 4000 processes took 100 MB, and half of a
// scrape went into looking for their parts.
type rows struct {
	list   []row
	byHash map[uint64]uint32
	last   []string // labels of the row that was asked for last, of the names lastOf
	lastOf []string
	lastID uint32
	labels []byte   // of all rows, as they are written
	counts []uint64 // of all histograms
}

// row is the labels of some series.
type row struct {
	from, to uint32    // in rows.labels
	has      [4]uint64 // families that have a series with it, by number
	series   uint64    // see identity
	owned    bool
}

// sample is a series: a counter or a gauge.
type sample struct {
	row   uint32
	value float64
}

// distribution is a summary, or a classic histogram.
type distribution struct {
	row    uint32
	from   int // in rows.counts: a cumulative count per bound
	bounds []float64
	count  uint64
	sum    float64
}

var seed = maphash.MakeSeed()

// hash is that of texts in their order.
func hash(h uint64, s string) uint64 { return h*0x9e3779b97f4a7c15 + maphash.String(seed, s) }

// begin forgets the rows of the last scrape.
func (t *rows) begin() {
	t.list, t.labels, t.counts, t.lastOf = t.list[:0], t.labels[:0], t.counts[:0], nil
	if t.byHash == nil {
		t.byHash = map[uint64]uint32{}
	}
	clear(t.byHash)
}

// row returns the row of a family's labels; false where the family has a series with it.
func (e *exposition) row(s *series, labels []string) (id uint32, ok bool) {
	t := e.text
	if t.lastOf == nil || !sameNames(t.lastOf, s.labels) || !slices.Equal(t.last, labels) {
		key := s.labelHash
		for _, v := range labels {
			key = hash(key, v)
		}
		id, ok := t.byHash[key]
		if !ok {
			id = uint32(len(t.list))
			t.byHash[key] = id
			r := row{from: uint32(len(t.labels))}
			for i, k := range s.order {
				var own bool
				r.series, own = identity(r.series, s.labels[k], labels[k])
				r.owned = r.owned || own
				t.labels = append(t.labels, "{,"[min(i, 1)])
				t.labels = append(append(t.labels, s.labels[k]...), `="`...)
				t.labels = append(appendEscaped(t.labels, labels[k]), '"')
			}
			if len(s.order) > 0 {
				t.labels = append(t.labels, '}')
			}
			r.to = uint32(len(t.labels))
			t.list = append(t.list, r)
		}
		t.last, t.lastOf, t.lastID = append(t.last[:0], labels...), s.labels, id
		if t.lastOf == nil {
			t.lastOf = []string{}
		}
	}
	r := &t.list[t.lastID]
	word, bit := s.number/64, uint64(1)<<(s.number%64)
	if r.has[word]&bit != 0 {
		e.errs = append(e.errs, fmt.Errorf("%s: twice with the same labels: %s", s.name, t.labels[r.from:r.to]))
		return 0, false
	}
	r.has[word] |= bit
	return t.lastID, true
}

// sameNames tells whether two families have the same list of labels: most share one.
func sameNames(a, b []string) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// appendEscaped appends the value of a label.
func appendEscaped(b []byte, v string) []byte {
	if !utf8.ValidString(v) {
		v = strings.ToValidUTF8(v, "\uFFFD")
	}
	for i := range len(v) {
		switch c := v[i]; c {
		case '\\', '"':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, '\\', 'n')
		default:
			b = append(b, c)
		}
	}
	return b
}

// writer writes families in one of the text formats.
type writer struct {
	e     *exposition
	out   *bytes.Buffer
	open  bool                                              // OpenMetrics
	isNew func(name string, series uint64, owned bool) bool // of a counter of fromZero: it begins at 0; nil: none does
	le    []byte                                            // a bound as text
}

// all writes every family, and then those of more.
func (w *writer) all(more []*dto.MetricFamily) {
	for _, s := range w.e.families {
		if len(s.samples)+len(s.distributions) > 0 {
			w.family(s)
		}
	}
	encode := expfmt.MetricFamilyToText
	if w.open {
		encode = func(out io.Writer, f *dto.MetricFamily) (int, error) { return expfmt.MetricFamilyToOpenMetrics(out, f) }
	}
	for _, f := range more {
		if _, err := encode(w.out, f); err != nil {
			w.e.errs = append(w.e.errs, err)
		}
	}
	if w.open {
		w.out.WriteString("# EOF\n")
	}
}

var (
	escapedHelp     = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	escapedOpenHelp = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
	kinds           = map[dto.MetricType]string{dto.MetricType_GAUGE: "gauge", dto.MetricType_COUNTER: "counter", dto.MetricType_SUMMARY: "summary",
		dto.MetricType_HISTOGRAM: "histogram"}
)

func (w *writer) family(s *series) {
	name := s.name
	if w.open && s.counter {
		name = strings.TrimSuffix(name, "_total")
	}
	help := escapedHelp
	if w.open {
		help = escapedOpenHelp
	}
	for _, part := range []string{"# HELP ", name, " ", help.Replace(s.help), "\n# TYPE ", name, " ", kinds[s.kind()], "\n"} {
		w.out.WriteString(part)
	}
	zero := s.counter && fromZero[s.name] && w.isNew != nil
	for _, x := range s.samples {
		v := x.value
		if r := &w.e.text.list[x.row]; zero && w.isNew(s.name, r.series, r.owned) {
			v = 0
		}
		w.line(s.name, "", x.row, v)
	}
	for i := range s.distributions {
		d := &s.distributions[i]
		if s.histogram {
			for k, bound := range d.bounds {
				w.le = w.appendFloat(w.le[:0], bound)
				w.count(s.name, "_bucket", d.row, w.le, w.e.text.counts[d.from+k])
			}
			w.le = append(w.le[:0], "+Inf"...)
			w.count(s.name, "_bucket", d.row, w.le, d.count)
		}
		w.line(s.name, "_sum", d.row, d.sum)
		w.count(s.name, "_count", d.row, nil, d.count)
	}
}

// head writes a series' name and labels, with a bound if there is one.
func (w *writer) head(name, suffix string, id uint32, le []byte) []byte {
	r := &w.e.text.list[id]
	labels := w.e.text.labels[r.from:r.to]
	w.out.Grow(len(name) + len(labels) + 100) // of a line nothing is longer
	b := append(append(w.out.AvailableBuffer(), name...), suffix...)
	switch {
	case le == nil:
		b = append(b, labels...)
	case len(labels) == 0:
		b = append(append(append(b, `{le="`...), le...), `"}`...)
	default:
		b = append(append(append(append(b, labels[:len(labels)-1]...), `,le="`...), le...), `"}`...)
	}
	return append(b, ' ')
}

func (w *writer) line(name, suffix string, id uint32, v float64) {
	w.out.Write(append(w.appendFloat(w.head(name, suffix, id, nil), v), '\n'))
}

func (w *writer) count(name, suffix string, id uint32, le []byte, n uint64) {
	b := w.head(name, suffix, id, le)
	if w.open {
		b = strconv.AppendUint(b, n, 10)
	} else {
		b = w.appendFloat(b, float64(n))
	}
	w.out.Write(append(b, '\n'))
}

// appendFloat writes a value as expfmt does.
func (w *writer) appendFloat(b []byte, v float64) []byte {
	switch {
	case math.IsInf(v, +1):
		return append(b, "+Inf"...)
	case math.IsInf(v, -1):
		return append(b, "-Inf"...)
	case math.IsNaN(v):
		return append(b, "NaN"...)
	}
	if v == 0 {
		v = 0 // no "-0"
	}
	n := len(b)
	b = strconv.AppendFloat(b, v, 'g', -1, 64)
	if w.open && !bytes.ContainsAny(b[n:], "e.") {
		b = append(b, ".0"...)
	}
	return b
}
