package main

import (
	"fmt"
	"math"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"gpu-exporter/nvml/fake"
)

// counters returns every counter of an exposition, and the sums and counts of histograms and summaries, by the text of its series.
func counters(t *testing.T, text string) map[string]float64 {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]float64{}
	for name, f := range families {
		for _, x := range f.Metric {
			k := name + fmt.Sprint(x.Label)
			switch {
			case x.Counter != nil:
				m[k] = x.Counter.GetValue()
			case x.Histogram != nil:
				m[k+" sum"], m[k+" count"] = x.Histogram.GetSampleSum(), float64(x.Histogram.GetSampleCount())
			case x.Summary != nil && !strings.HasPrefix(name, "go_"):
				m[k+" sum"], m[k+" count"] = x.Summary.GetSampleSum(), float64(x.Summary.GetSampleCount())
			}
		}
	}
	return m
}

// TestCountersSurvive: at every scrape no counter is below what it was at the one before, and memory, energy and PCIe bytes add up, while the worker is
// killed, NVML is loaded anew, the driver's own counters begin anew, a GPU falls off the bus, and processes end and are
// forgotten. The lost GPU keeps gpu_up 0 with the labels it had, and loses its readings.
func TestCountersSurvive(t *testing.T) {
	gpus := []fake.GPU{fake.H200(0), fake.H200(1)}
	job, brief, other := sleeper(t), exec.Command("sleep", "600"), sleeper(t)
	if err := brief.Start(); err != nil {
		t.Fatal(err)
	}
	for i := range gpus {
		g := &gpus[i]
		hold(g, 300*mib, fake.Process{PID: job, Memory: 2 * gib}, fake.Process{PID: other, Memory: gib})
		g.Busy = []fake.Busy{{PID: job, SM: 50}, {PID: other, SM: 20}}
		g.Set("energy", 1_000_000+i, 300_000) // 300 W
		g.GPM[20], g.GPM[21] = 1000, 2000
		g.Set("throttle", 4)
	}
	with := append([]fake.GPU(nil), gpus...)
	hold(&with[0], 300*mib, append(gpus[0].Processes, fake.Process{PID: brief.Process.Pid, Memory: gib})...)
	with[0].Busy = append(with[0].Busy, fake.Busy{PID: brief.Process.Pid, SM: 25})
	h := fake.Install(t, fake.Scenario{GPUs: with})
	p := start(t, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil), "--nvml.interval=100ms", "--linger=2s", "--tracer=off")

	last, scrapes, sums := map[string]float64{}, 0, 0
	look := func() scrape {
		t.Helper()
		text := p.get(t, "/metrics")
		now := counters(t, text)
		for k, v := range now {
			if was, ok := last[k]; ok && v < was || v < 0 || math.IsNaN(v) {
				t.Errorf("scrape %d: %s fell from %v to %v", scrapes, k, was, v)
			}
		}
		last = now
		scrapes++
		s := parse(t, text)
		for _, g := range gpus {
			for _, a := range [][3]string{{"gpu_memory_used_bytes", "gpu_device_memory_used_bytes"}, {"gpu_energy_joules_total", "gpu_device_energy_joules_total"},
				{"gpu_pci_bandwidth_bytes_total", "gpu_device_pcie_bytes_total", "host_to_device"}, {"gpu_pci_bandwidth_bytes_total", "gpu_device_pcie_bytes_total", "device_to_host"}} {
				labels := []string{"gpu_device_uuid", uuid(g)}
				if a[2] != "" {
					labels = append(labels, "direction", a[2])
				}
				if device := s.find(a[1], labels...); len(device) == 1 {
					sums++
					if got := s.sum(a[0], labels...); got != device[0].value {
						t.Errorf("scrape %d: %s%v of all workloads is %v, of the device %v", scrapes, a[0], labels, got, device[0].value)
					}
				}
			}
		}
		return s
	}
	until := func(what string, ok func(scrape) bool) scrape {
		t.Helper()
		for deadline := time.Now().Add(25 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			if s := look(); ok(s) {
				return s
			}
			if time.Now().After(deadline) {
				t.Fatalf("it does not come to: %s\n%s\n%s", what, p.log.String(), p.get(t, "/metrics"))
			}
		}
	}
	busy := func(pid int) func(scrape) float64 {
		return func(s scrape) float64 { return s.sum("gpu_busy_seconds_total", "process_pid", fmt.Sprint(pid)) }
	}
	up := func(s scrape) bool { return s.sum("gpu_up") == 2 }
	working := func(what string) scrape {
		t.Helper()
		from := busy(job)(until(what+": up", up))
		return until(what+": counting on", func(s scrape) bool { return up(s) && busy(job)(s) > from+0.3 })
	}
	until("all processes have counters", func(s scrape) bool {
		return busy(job)(s) > 0 && busy(brief.Process.Pid)(s) > 0 && len(s["gpu_device_pcie_bytes_total"]) == 4 && len(s["gpu_device_energy_joules_total"]) == 2
	})

	t.Run("NVML loaded anew", func(t *testing.T) {
		h.Set(t, fake.Scenario{GPUs: with, Faults: []fake.Fault{{GPU: fake.AnyGPU, Kind: fake.Return, Arg: 9}}})
		until("NVML is gone", func(s scrape) bool { return s.has(0, "gpu_exporter_nvml_up") })
		for i := range with { // a driver that is loaded anew counts from 0
			with[i].Set("energy", 0, 300_000)
			gpus[i].Set("energy", 0, 300_000)
		}
		h.Set(t, fake.Scenario{GPUs: with})
		working("after the reload")
	})
	t.Run("worker killed", func(t *testing.T) {
		before := look().sum("gpu_exporter_nvml_restarts_total")
		for _, pid := range descendants(p.cmd.Process.Pid) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		until("a restart", func(s scrape) bool { return s.sum("gpu_exporter_nvml_restarts_total") > before })
		working("after the kill")
	})
	t.Run("process ends", func(t *testing.T) {
		pid := brief.Process.Pid
		// The energy of a reading is shared out when the samples of its time are there.
		was := busy(pid)(until("a share of the energy", func(s scrape) bool { return s.sum("gpu_energy_joules_total", "process_pid", fmt.Sprint(pid)) > 0 }))
		brief.Process.Kill()
		brief.Wait()
		h.Set(t, fake.Scenario{GPUs: gpus})
		s := until("no memory of it", func(s scrape) bool { return len(s.find("gpu_memory_used_bytes", "process_pid", fmt.Sprint(pid))) == 0 })
		if got := busy(pid)(s); got < was || got == 0 {
			t.Errorf("its counter is %v, was %v", got, was)
		}
		rest := func(s scrape) float64 {
			return s.sum("gpu_energy_joules_total", "process_pid", "", "gpu_device_uuid", uuid(gpus[0]))
		}
		before := rest(s)
		s = until("nothing of it", func(s scrape) bool {
			for name := range s {
				if len(s.find(name, "process_pid", fmt.Sprint(pid))) > 0 {
					return false
				}
			}
			return true
		})
		if rest(s) <= before {
			t.Errorf("the rest did not take over its energy: %v, then %v J", before, rest(s))
		}
	})
	t.Run("GPU lost", func(t *testing.T) {
		before := look()
		lost := append([]fake.GPU(nil), gpus...)
		h.Set(t, fake.Scenario{GPUs: lost, Faults: []fake.Fault{{GPU: 1, Kind: fake.Return, Arg: 15}}})
		s := until("gpu_up 0", func(s scrape) bool { return s.has(0, "gpu_up", "gpu_device_uuid", uuid(gpus[1])) })
		if was, now := before.find("gpu_up", "gpu_device_uuid", uuid(gpus[1])), s.find("gpu_up", "gpu_device_uuid", uuid(gpus[1])); fmt.Sprint(was[0].labels) != fmt.Sprint(now[0].labels) {
			t.Errorf("labels %v, were %v", now[0].labels, was[0].labels)
		}
		s.want(t, 1, "gpu_up", "gpu_device_uuid", uuid(gpus[0]))
		for name := range s {
			reading := !strings.HasSuffix(name, "_total") && !strings.HasSuffix(name, "_info") && !strings.Contains(name, "_sample_") && name != "gpu_up"
			if list := s.find(name, "gpu_device_uuid", uuid(gpus[1])); reading && len(list) > 0 {
				t.Errorf("a lost GPU has %s: %v", name, list)
			}
			if !reading && len(s.find(name, "gpu_device_uuid", uuid(gpus[1]))) < len(before.find(name, "gpu_device_uuid", uuid(gpus[1]))) && strings.HasPrefix(name, "gpu_device_") {
				t.Errorf("a lost GPU loses %s", name)
			}
		}
		was := s.sum("gpu_busy_seconds_total", "gpu_device_uuid", uuid(gpus[0])) // the other one goes on
		until("counting on", func(s scrape) bool {
			return s.sum("gpu_busy_seconds_total", "gpu_device_uuid", uuid(gpus[0])) > was+0.3
		})
	})
	t.Run("the other one gone, and numbers anew", func(t *testing.T) {
		h.Set(t, fake.Scenario{GPUs: gpus, Faults: []fake.Fault{{GPU: fake.AnyGPU, Kind: fake.Return, Arg: 9}}})
		was := until("NVML is gone", func(s scrape) bool { return s.has(0, "gpu_exporter_nvml_up") })
		h.Set(t, fake.Scenario{GPUs: gpus[1:]}) // now the first
		s := until("the second GPU alone", func(s scrape) bool {
			return s.has(1, "gpu_up", "gpu_device_uuid", uuid(gpus[1])) && s.has(0, "gpu_up", "gpu_device_uuid", uuid(gpus[0]))
		})
		s.want(t, 1, "gpu_device_info", "gpu_device_uuid", uuid(gpus[1]), "index", "0")
		for _, g := range gpus {
			if before, now := was.sum("gpu_energy_joules_total", "gpu_device_uuid", uuid(g)), s.sum("gpu_energy_joules_total", "gpu_device_uuid", uuid(g)); now < before || now == 0 {
				t.Errorf("%s: %v J, then %v", uuid(g), before, now)
			}
		}
	})
	if sums < 4*scrapes {
		t.Errorf("only %d sums at %d scrapes", sums, scrapes)
	}
	t.Logf("%d scrapes, %d sums, %d counters at the end", scrapes, sums, len(last))
	p.stop(t)
}
