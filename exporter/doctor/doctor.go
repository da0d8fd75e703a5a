// Package doctor looks at a host for what keeps GPUs, containers or the exporter from working. Each check says what it found and what to do;
// the troubleshooting table of the README is made of the same checks.
package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/view"
)

//go:generate go run ./generate ../../README.md

// State says how bad a finding is.
type State string

// The states, from good to bad.
const (
	OK      State = "ok"
	Unknown State = "unknown" // it cannot be told; another finding says why
	Warning State = "warning" // something is missing; the rest works
	Broken  State = "broken"  // GPUs, containers or the exporter do not work
)

// ExitCode is 0 for ok, 1 for warnings and 2 for what is broken.
func (s State) ExitCode() int {
	switch s {
	case OK, Unknown:
		return 0
	case Warning:
		return 1
	}
	return 2
}

// Finding is what a check says.
type Finding struct {
	Check    string `json:"check"`
	State    State  `json:"state"`
	Evidence string `json:"evidence"`         // what was seen: one line
	Advice   string `json:"advice,omitempty"` // what to do; empty when all is well
}

// Report is what all checks say.
type Report struct {
	State    State     `json:"state"` // the worst of the findings
	Findings []Finding `json:"findings"`
}

// Host is where to look. The directories may be of a tree that only resembles a host.
type Host struct {
	Proc       string // a procfs of the host's PID namespace
	Sys        string // a sysfs
	DriverRoot string // below it are the driver's libraries, /dev, and the configuration of CDI

	Engine   docker.Info    // what the engine says of itself
	Snapshot *view.Snapshot // what the exporter sees; nil: there is none
	Reason   string         // why there is none
	Stranger bool           // something answers where the exporter should, and is none
	Sampled  bool           // no exporter runs: the snapshot is of this process, some seconds old
	From     string         // where the snapshot is from
	Now      time.Time

	own       processes.Own // of the exporter, else of this process
	elsewhere string        // the name of the host that the exporter runs on, where that is another
}

const (
	staleAfter  = 10 * time.Second // the age at which a snapshot says that sampling has stopped
	maxFindings = 20               // of a check, which are listed
	patience    = 5 * time.Second  // a check that takes longer waits for a driver that does not answer
)

// Fault is one thing that can be wrong.
type Fault struct {
	State  State
	Sign   string // how it shows
	Advice string // what to do
}

// Check is one thing that is looked at, with all that can be wrong there.
type Check struct {
	Name   string
	Faults []*Fault
	look   func(*Host) []found
}

// found is one finding of a check; without a fault all is well.
type found struct {
	fault    *Fault
	evidence string
}

var unknown = &Fault{State: Unknown}

func fine(evidence string) []found              { return []found{{nil, evidence}} }
func wrong(f *Fault, evidence string) []found   { return []found{{f, evidence}} }
func (h *Host) sysfs(elements ...string) string { return read(h.Sys, elements...) }
func (h *Host) proc(elements ...string) string  { return read(h.Proc, elements...) }

// file is a path below the driver's root.
func (h *Host) file(path string) string { return filepath.Join(h.DriverRoot, path) }

func (h *Host) glob(pattern string) []string {
	list, _ := filepath.Glob(h.file(pattern)) // only a directory with such a name could break the pattern
	return list
}

// maxFile bounds what is read of a file.
const maxFile = 1 << 20

// read returns the text of a file without the white space around it; empty when it cannot be read.
func read(dir string, elements ...string) string {
	path := filepath.Join(append([]string{dir}, elements...)...)
	if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() || st.Size() > maxFile {
		return ""
	}
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// few joins names, and counts those after the first five.
func few(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	if len(names) > 5 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:5], ", "), len(names)-5)
	}
	return strings.Join(names, ", ")
}

// Examine runs every check.
func Examine(h *Host) *Report { return examine(h, Checks, patience) }

func examine(h *Host, checks []Check, patience time.Duration) *Report {
	own := *h
	own.meet()
	r := &Report{State: OK}
	for _, c := range checks {
		answer := make(chan []found, 1)
		go func() { answer <- c.look(&own) }()
		var list []found
		select {
		case list = <-answer:
		case <-time.After(patience):
			list = wrong(stuck, fmt.Sprintf("no answer from the kernel within %v", patience))
		}
		for i, f := range list {
			if i == maxFindings {
				f.evidence = fmt.Sprintf("and %d more", len(list)-i)
			}
			finding := Finding{Check: c.Name, State: OK, Evidence: containers.Clean(f.evidence, 2000)}
			if f.fault != nil {
				finding.State, finding.Advice = f.fault.State, f.fault.Advice
			}
			if finding.State.ExitCode() > r.State.ExitCode() {
				r.State = finding.State
			}
			if i <= maxFindings {
				r.Findings = append(r.Findings, finding)
			}
		}
	}
	return r
}

// Table is the troubleshooting table of the README, in Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| check | what can be wrong | do |\n|---|---|---|\n")
	row := func(name string, f *Fault) { b.WriteString("| " + name + " | " + f.Sign + " | " + f.Advice + " |\n") }
	for _, c := range Checks {
		for _, f := range c.Faults {
			row(c.Name, f)
		}
	}
	row("any", stuck)
	return b.String()
}
