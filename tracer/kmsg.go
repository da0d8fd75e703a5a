package tracer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"gpu-exporter/tracer/activity"
)

// kernelLog reads the driver's Xid reports in the kernel's log, where neither the driver's tracepoint can be had nor, perhaps, NVML's events: the last
// resort, of drivers without the tracepoint and of kernels that cannot be traced.
type kernelLog struct {
	file     *os.File
	facility int // whose records count: the kernel's is 0
	reports  chan activity.Xid
	closed   chan struct{}
}

// openKernelLog reads what is logged from now on.
func openKernelLog(c *Config) (*kernelLog, error) {
	f, err := os.Open(c.kernelLog)
	if err == nil {
		_, err = f.Seek(0, io.SeekEnd)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's log: %w", err)
	}
	l := &kernelLog{file: f, facility: c.facility, reports: make(chan activity.Xid, 64), closed: make(chan struct{})}
	go l.read()
	return l, nil
}

func (l *kernelLog) close() {
	if l != nil {
		close(l.closed)
		l.file.Close() // ends read
	}
}

// xids is where reports come; nobody gives them where there is no log.
func (l *kernelLog) xids() <-chan activity.Xid {
	if l == nil {
		return nil
	}
	return l.reports
}

func (l *kernelLog) read() {
	record := make([]byte, 16<<10) // the kernel has none longer than 8 KB
	for {
		n, err := l.file.Read(record)
		switch {
		case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EINTR):
			continue // records were overwritten before they were read
		case err != nil || n == 0:
			return
		}
		if x, ok := xidOf(string(record[:n]), l.facility); ok {
			select {
			case l.reports <- x:
			case <-l.closed:
				return
			}
		}
	}
}

// xidLine is how the driver words it: "NVRM: Xid (PCI:0000:0a:00): 79, pid=1234, name=python, GPU has fallen off the bus.", with a MIG instance
// "(PCI:0000:0a:00 GPU-I:05)", before driver 310 without "PCI:".
var xidLine = regexp.MustCompile(`NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?(?: [^)]*)?\): (\d{1,9})(?:, *(.*))?$`)

// xidOf reads a record of /dev/kmsg, "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT" and lines of properties. Only records of the facility count:
// what programs write there cannot have the kernel's.
func xidOf(record string, facility int) (activity.Xid, bool) {
	head, text, ok := strings.Cut(record, ";")
	if !ok || !strings.Contains(text, "NVRM: Xid") {
		return activity.Xid{}, false
	}
	priority, _, _ := strings.Cut(head, ",")
	if p, err := strconv.Atoi(priority); err != nil || p < 0 || p>>3 != facility {
		return activity.Xid{}, false
	}
	text, _, _ = strings.Cut(text, "\n")
	m := xidLine.FindStringSubmatch(text)
	if m == nil {
		return activity.Xid{}, false
	}
	code, err := strconv.ParseUint(m[2], 10, 32)
	if err != nil {
		return activity.Xid{}, false
	}
	var domain, bus, slot uint32
	if _, err := fmt.Sscanf(m[1], "%x:%x:%x", &domain, &bus, &slot); err != nil {
		return activity.Xid{}, false
	}
	return activity.Xid{Time: time.Now().UnixNano(), PCIBusID: fmt.Sprintf("%04x:%02x:%02x.0", domain, bus, slot), Code: code, Message: m[3], PID: xidPID(m[3])}, true
}
