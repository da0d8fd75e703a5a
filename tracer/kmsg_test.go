package tracer

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// TestKernelLogLines: what the drivers of twenty years write, and what is no report of theirs.
func TestKernelLogLines(t *testing.T) {
	for line, want := range map[string]activity.Xid{
		"4,1234,5678,-;NVRM: Xid (PCI:0000:0a:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n SUBSYSTEM=pci\n DEVICE=+pci:0000:0a:00.0\n": {PCIBusID: "0000:0a:00.0", Code: 79, PID: 1234,
			Message: "pid=1234, name=python, GPU has fallen off the bus."},
		"3,1,1,-;NVRM: Xid (PCI:0000:c1:00 GPU-I:05): 13, pid=77, name=a, Graphics SM Warp Exception": {PCIBusID: "0000:c1:00.0", Code: 13, PID: 77, Message: "pid=77, name=a, Graphics SM Warp Exception"},
		"6,1,1,-,caller=T1;NVRM: Xid (PCI:00010000:0A:1f): 31, pid='<unknown>', name=<unknown>, MMU Fault": {PCIBusID: "10000:0a:1f.0", Code: 31,
			Message: "pid='<unknown>', name=<unknown>, MMU Fault"},
		"4,1,1,-;NVRM: Xid (0000:03:00): 13, 0003 00000000 00008297": {PCIBusID: "0000:03:00.0", Code: 13, Message: "0003 00000000 00008297"},
		"4,1,1,-;NVRM: Xid (PCI:0000:18:00): 154":                    {PCIBusID: "0000:18:00.0", Code: 154},
	} {
		got, ok := xidOf(line, 0)
		if got.Time = 0; !ok || got != want {
			t.Errorf("%q: %+v, %v", line, got, ok)
		}
	}
	for _, line := range []string{"", ";", "NVRM: Xid (PCI:0000:0a:00): 79", "12,1,1,-;NVRM: Xid (PCI:0000:0a:00): 79, a program's", "x,1,1,-;NVRM: Xid (PCI:0000:0a:00): 79, x",
		"-1,1,1,-;NVRM: Xid (PCI:0000:0a:00): 79, x", "4,1,1,-;NVRM: Xid (PCI:0000:0a): 79, x", "4,1,1,-;NVRM: Xid (PCI:0000:0a:00): many, x",
		"4,1,1,-;NVRM: Xid (PCI:0000:0a:00): 79999999999999999999, x", "4,1,1,-;NVRM: GPU at PCI:0000:0a:00: GPU-9026ca80", "4,1,1,-;usb 1-1: new device\n NVRM: Xid (PCI:0000:0a:00): 79, a property",
		"4,1,1,-;NVRM: Xid (PCI:0000:zz:00): 79, x"} {
		if got, ok := xidOf(line, 0); ok {
			t.Errorf("%q: %+v", line, got)
		}
	}
}

// TestKernelLog: where the driver has no tracepoint its Xids come from the kernel's log, whether the kernel is traced or not. What was logged before is not
// told, each report is told once, and one that NVML tells of too is counted once.
func TestKernelLog(t *testing.T) {
	log, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	const user = 1 // the facility of what programs write
	write := func(text string) {
		t.Helper()
		if _, err := fmt.Fprintf(log, "<%d>%s\n", user<<3|4, text); err != nil {
			t.Fatal(err)
		}
	}
	write("NVRM: Xid (PCI:0000:0a:00): 48, pid=1, name=before, DBE")
	for _, mode := range []string{testMode, ModeOff} {
		t.Run(mode, func(t *testing.T) {
			tracer, err := New(Config{Mode: mode, Devices: devices, facility: user})
			if err != nil {
				t.Fatal(err)
			}
			b := snapshot.NewBuilder(snapshot.Config{})
			device := frame.Device{UUID: "GPU-a", Info: &frame.Info{PCIBusID: "0000:0a:00.0"}, Load: &frame.Load{}}
			b.Apply(input.Input{Time: time.Now().UnixNano(), Frame: &frame.Frame{Device: &device}})
			var mu sync.Mutex
			var told []activity.Xid
			reports := 0
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() {
				ended <- tracer.Run(ctx, func(r *activity.Report) {
					mu.Lock()
					defer mu.Unlock()
					reports++
					for _, x := range r.Xids {
						if !slices.Contains(told, x) {
							told = append(told, x)
						}
					}
					b.Apply(input.Input{Time: r.Time, Tracer: r})
				})
			}()
			until := func(what string, ok func() bool) {
				t.Helper()
				for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
					mu.Lock()
					done := ok()
					mu.Unlock()
					if done {
						return
					}
					if time.Now().After(deadline) {
						t.Fatalf("not within 10 s: %s; told %+v", what, told)
					}
				}
			}
			until("a report", func() bool { return reports > 0 })
			write("NVRM: Xid (PCI:0000:0a:00): 79, pid=1234, name=python, GPU has fallen off the bus.")
			until("the Xid", func() bool { return len(told) == 1 })
			write("something else")
			write("NVRM: Xid (PCI:0000:0a:00): 31, pid=1234, name=python, MMU Fault")
			until("another one", func() bool { return len(told) == 2 })
			was := reports
			until("further reports", func() bool { return reports > was+2 })
			mu.Lock()
			defer mu.Unlock()
			if len(told) != 2 || told[0].Code != 79 || told[0].PID != 1234 || told[1].Code != 31 || !strings.HasSuffix(told[1].Message, "MMU Fault") || time.Since(time.Unix(0, told[0].Time)) > time.Minute {
				t.Errorf("told %+v", told)
			}
			now := time.Now()
			b.Apply(input.Input{Time: now.UnixNano(), Frame: &frame.Frame{Events: []frame.Event{{Time: now.UnixNano(), UUID: "GPU-a", Kind: "xid", Value: 79}}}})
			if x := b.Snapshot(now).Devices[0].Xids; len(x) != 2 || x[79].Count != 1 || x[31].Count != 1 {
				t.Errorf("counted %+v", x)
			}
			mu.Unlock()
			cancel()
			err = <-ended
			mu.Lock()
			if err != nil {
				t.Error(err)
			}
		})
	}
}
