// Command record-ioctls records every driver call on a GPU host, and NVML's view beside it, as test data for the VRAM ledger:
// NAME.ioctl.jsonl.gz with one call a line, NAME.nvml.jsonl with what NVML says of every process, 20 times a second.
// It needs root. It ends on SIGINT, SIGTERM or after --for.
package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"gpu-exporter/nvml"
	"gpu-exporter/tracer/tracefs"
)

func main() {
	name := flag.String("out", "recording", "`NAME` of the two files, without endings")
	length := flag.Duration("for", 0, "how long to record; 0: until interrupted")
	rate := flag.Int("rate", 20, "NVML readings a `second`; 0: none")
	library := flag.String("library", "", "`path` of libnvidia-ml.so.1; empty: search")
	extra := flag.String("majors", "", "more device `majors` to record, such as 1,10")
	flag.Parse()
	if flag.NArg() > 0 || *rate < 0 || *rate > 1000 {
		fmt.Fprintln(os.Stderr, "record-ioctls: no arguments, and a rate from 0 to 1000")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *length > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *length)
		defer cancel()
	}
	if err := record(ctx, *name, *rate, *library, *extra); err != nil {
		fmt.Fprintln(os.Stderr, "record-ioctls:", err)
		os.Exit(1)
	}
}

func record(ctx context.Context, name string, rate int, library, extra string) (err error) {
	majors, err := deviceMajors(extra)
	if err != nil {
		return err
	}
	var objects recordObjects
	if err := loadRecordObjects(&objects, nil); err != nil {
		return fmt.Errorf("loading the programs: %w", err)
	}
	defer objects.Close()
	for _, major := range majors {
		if err := objects.Majors.Put(major, uint8(1)); err != nil {
			return fmt.Errorf("choosing devices: %w", err)
		}
	}
	links, err := attach(&objects)
	if err != nil {
		return err
	}
	defer func() {
		for _, l := range links {
			l.Close()
		}
	}()
	reader, err := ringbuf.NewReader(objects.Records)
	if err != nil {
		return fmt.Errorf("reading records: %w", err)
	}
	file, err := os.Create(name + ".ioctl.jsonl.gz")
	if err != nil {
		return err
	}
	zipped := gzip.NewWriter(file)
	defer func() { err = errors.Join(err, zipped.Close(), file.Close()) }()

	polled := make(chan error, 1)
	var readings atomic.Int64
	if rate > 0 {
		go func() { polled <- poll(ctx, name+".nvml.jsonl", library, time.Second/time.Duration(rate), &readings) }()
	} else {
		polled <- nil
	}
	fmt.Fprintln(os.Stderr, "recording")
	go func() {
		<-ctx.Done()
		time.Sleep(200 * time.Millisecond) // calls that the last reading saw
		reader.Close()
	}()
	count := 0
	lines := json.NewEncoder(zipped)
	for {
		raw, err := reader.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading records: %w", err)
		}
		var r recordRecord
		if err := binary.Read(bytes.NewReader(raw.RawSample), binary.NativeEndian, &r); err != nil {
			return fmt.Errorf("reading a record: %w", err)
		}
		if err := lines.Encode(line(&r)); err != nil {
			return fmt.Errorf("writing a call: %w", err)
		}
		count++
	}
	var lost uint64
	if err := objects.Lost.Lookup(uint32(0), &lost); err != nil {
		return fmt.Errorf("reading the number of lost records: %w", err)
	}
	fmt.Fprintf(os.Stderr, "%d calls, %d lost, %d NVML readings\n", count, lost, readings.Load())
	return <-polled
}

// call is a line of NAME.ioctl.jsonl.gz.
type call struct {
	Cgroup uint64 `json:"cg"`
	Cmd    string `json:"cmd"`
	Comm   string `json:"comm"`
	Deep   string `json:"deep"`
	Dur    uint64 `json:"dur"`
	In     string `json:"in"`
	Out    string `json:"out"`
	Rdev   string `json:"rdev"`
	Ret    int64  `json:"ret"`
	TGID   uint32 `json:"tgid"`
	TID    uint32 `json:"tid"`
	TS     uint64 `json:"ts"`
}

func line(r *recordRecord) call {
	comm := make([]byte, 0, len(r.Comm))
	for _, c := range r.Comm {
		if c == 0 {
			break
		}
		comm = append(comm, byte(c))
	}
	return call{
		Cgroup: r.Cgroup, Cmd: fmt.Sprintf("0x%x", r.Cmd), Comm: strings.ToValidUTF8(string(comm), "?"), Dur: r.Dur, TGID: r.Tgid, TID: r.Tid, TS: r.Ts,
		Ret: r.Ret, Rdev: fmt.Sprintf("%d:%d", r.Rdev>>20, r.Rdev&0xfffff),
		In: hex.EncodeToString(r.In[:]), Out: hex.EncodeToString(r.Out[:]), Deep: hex.EncodeToString(r.Deep[:]),
	}
}

// deviceMajors returns NVIDIA's major and those of nvidia-uvm and nvidia-caps, and the extra ones.
func deviceMajors(extra string) ([]uint32, error) {
	majors := []uint32{195}
	file, err := os.Open("/proc/devices")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var major uint32
		var name string
		if n, _ := fmt.Sscan(lines.Text(), &major, &name); n == 2 && strings.HasPrefix(name, "nvidia") {
			majors = append(majors, major)
		}
	}
	for text := range strings.SplitSeq(extra, ",") {
		if text == "" {
			continue
		}
		major, err := strconv.ParseUint(text, 10, 12)
		if err != nil {
			return nil, fmt.Errorf("--majors %q: not a list of numbers", extra)
		}
		majors = append(majors, uint32(major))
	}
	return majors, nil
}

// attach puts the programs on the ioctl system call.
func attach(objects *recordObjects) (links []link.Link, err error) {
	err = tracefs.Do(func() error {
		leave, err := link.Tracepoint("syscalls", "sys_exit_ioctl", objects.Leave, nil)
		if err != nil {
			return fmt.Errorf("attaching: %w", err)
		}
		links = append(links, leave)
		enter, err := link.Tracepoint("syscalls", "sys_enter_ioctl", objects.Enter, nil)
		if err != nil {
			return fmt.Errorf("attaching: %w", err)
		}
		links = append(links, enter)
		return nil
	})
	return links, err
}

// checkpoint is a line of NAME.nvml.jsonl.
type checkpoint struct {
	T0      int64             `json:"t0"`
	T1      int64             `json:"t1"`
	Step    string            `json:"step"`
	DevUsed uint64            `json:"dev_used"` // of all GPUs together
	Procs   map[string]uint64 `json:"procs"`
}

func monotonic() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // every Linux has this clock
	}
	return t.Nano()
}

// poll writes what NVML says of every process, summed over the GPUs.
func poll(ctx context.Context, path, library string, every time.Duration, readings *atomic.Int64) (err error) {
	lib, err := nvml.Open(nvml.Config{Path: library})
	if err != nil {
		return fmt.Errorf("opening NVML: %w", err)
	}
	if err := lib.Init(); err != nil {
		return fmt.Errorf("starting NVML: %w", err)
	}
	defer func() { err = errors.Join(err, lib.Shutdown()) }()
	n, err := lib.DeviceGetCount()
	if err != nil {
		return fmt.Errorf("counting GPUs: %w", err)
	}
	var devices []*nvml.Device
	for i := range n {
		d, err := lib.DeviceGetHandleByIndex(i)
		if err != nil {
			return fmt.Errorf("opening GPU %d: %w", i, err)
		}
		devices = append(devices, d)
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	lines := json.NewEncoder(file)
	tick := time.NewTicker(every)
	defer tick.Stop()
	var buf []nvml.ProcessInfo
	for number := 0; ; number++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		point := checkpoint{Step: strconv.Itoa(number), Procs: map[string]uint64{}, T0: monotonic()}
		failed := false
		for _, d := range devices {
			if buf, err = d.GetComputeRunningProcesses(buf[:0]); err != nil {
				failed = true
				break
			}
			for _, p := range buf {
				if p.HasMemory {
					point.Procs[strconv.Itoa(p.PID)] += p.UsedMemory
				}
			}
		}
		point.T1 = monotonic()
		if failed {
			continue // a reading that is not whole is none
		}
		for _, d := range devices {
			if m, err := d.GetMemoryInfo(); err == nil {
				point.DevUsed += m.Used
			}
		}
		if err := lines.Encode(point); err != nil {
			return fmt.Errorf("writing a reading: %w", err)
		}
		readings.Add(1)
	}
}
