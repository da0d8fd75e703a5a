package tracer

import (
	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/probes"
)

// prober puts probes on libraries and reads their totals, beside the loop: putting them on takes a second. A nil prober does nothing.
type prober struct {
	probes *probes.Probes
	work   chan int // a process to scan; 0: read the totals
	out    chan probed
	end    chan struct{}
	ended  chan struct{}
	asked  int // by the loop, which counts the answers too: they come in order
	got    int
}

// probed is what the probes say at one moment.
type probed struct {
	totals    map[int]probes.Totals
	libraries []activity.Probe
	lost      uint64
}

func newProber(p *probes.Probes) *prober {
	r := &prober{probes: p, work: make(chan int, 1024), out: make(chan probed), end: make(chan struct{}), ended: make(chan struct{})}
	go r.run()
	return r
}

func (r *prober) run() {
	defer close(r.ended)
	for {
		select {
		case <-r.end:
			return
		case pid := <-r.work:
			if pid != 0 {
				r.probes.Scan(pid)
				continue
			}
		}
		select {
		case r.out <- probed{r.probes.Totals(nil), r.probes.Libraries(), r.probes.Lost()}:
		case <-r.end:
			return
		}
	}
}

// scan has a process's libraries looked at. Work that does not fit is left, and false returned: the process is scanned again when it is
// reconciled.
func (r *prober) scan(pid int) bool {
	if r == nil {
		return false
	}
	select {
	case r.work <- pid:
		return true
	default:
		return false
	}
}

// ask has the totals read. It returns the number of the answer that will have them, and false where they are not read.
func (r *prober) ask() (number int, ok bool) {
	if ok = r.scan(0); ok {
		r.asked++
		number = r.asked
	}
	return number, ok
}

// results is where the totals come.
func (r *prober) results() <-chan probed {
	if r == nil {
		return nil
	}
	return r.out
}

func (r *prober) close() {
	close(r.end)
	<-r.ended
	_ = r.probes.Close() // the kernel drops the probes with their last descriptor
}
