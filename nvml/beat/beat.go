// Package beat has tickers that tick at the same moments. A program whose tickers began at different ones is woken up for each of them, and most of
// what a sleeping program costs is being woken up.
package beat

import "time"

// Ticker ticks at the multiples of its period of the wall clock. It is made by New.
type Ticker struct {
	C      <-chan time.Time
	timer  *time.Timer
	period time.Duration
	now    func() time.Time // for tests
}

// New returns a ticker that ticks at the next multiple of the period, and then whenever Again has been called.
func New(period time.Duration) *Ticker {
	t := &Ticker{period: period, now: time.Now}
	t.timer = time.NewTimer(t.wait())
	t.C = t.timer.C
	return t
}

// Again asks for the next tick. Those that have passed meanwhile are left out.
func (t *Ticker) Again() { t.timer.Reset(t.wait()) }

// Stop ends the ticker.
func (t *Ticker) Stop() { t.timer.Stop() }

// wait is the time to the next tick.
func (t *Ticker) wait() time.Duration {
	now := t.now().Round(0) // the wall clock's
	// A timer may fire a little before the wall clock is there: that is no reason for a second tick.
	return now.Add(t.period / 8).Truncate(t.period).Add(t.period).Sub(now)
}
