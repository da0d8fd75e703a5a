package beat

import (
	"testing"
	"time"
)

// TestWait: the next tick is at a multiple of the period, also where a tick came a little early, late, or the clock was set.
func TestWait(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		name   string
		now    time.Time
		period time.Duration
		want   time.Duration
	}{
		{"on time", at, time.Second, time.Second},
		{"a little late", at.Add(3 * time.Millisecond), time.Second, 997 * time.Millisecond},
		{"a little early", at.Add(-time.Millisecond), time.Second, 1001 * time.Millisecond},
		{"half a period late", at.Add(500 * time.Millisecond), time.Second, 500 * time.Millisecond},
		{"another period", at, 10 * time.Second, 5 * time.Second},
		{"the clock was set back", at.Add(-time.Hour), time.Second, time.Second},
	} {
		ticker := &Ticker{period: c.period, now: func() time.Time { return c.now }}
		if got := ticker.wait(); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestTogether: tickers that began at different moments tick at the same one.
func TestTogether(t *testing.T) {
	const period = 200 * time.Millisecond
	a := New(period)
	time.Sleep(30 * time.Millisecond)
	b := New(period)
	for range 3 {
		for _, ticker := range []*Ticker{a, b} {
			at := <-ticker.C
			if early := at.Round(0).Add(period / 8); early.Sub(early.Truncate(period)) > period-period/8 {
				t.Errorf("a tick at %v", at)
			}
			ticker.Again()
		}
	}
	a.Stop()
	b.Stop()
}
