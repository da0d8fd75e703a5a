package tracer_test

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/ledger"
)

// recordedCall is one line of NAME.ioctl.jsonl.gz.
type recordedCall struct {
	TS   int64  `json:"ts"`
	Dur  int64  `json:"dur"`
	TGID int32  `json:"tgid"`
	TID  int32  `json:"tid"`
	Rdev string `json:"rdev"`
	Cmd  string `json:"cmd"`
	Ret  int64  `json:"ret"`
	CG   uint64 `json:"cg"`
	In   string `json:"in"`
	Out  string `json:"out"`
	Deep string `json:"deep"`
}

// checkpoint is one line of NAME.nvml.jsonl. The value of a process is its bytes, or an object of bytes by GPU.
type checkpoint struct {
	T0    int64                      `json:"t0"`
	T1    int64                      `json:"t1"`
	Step  string                     `json:"step"`
	Procs map[string]json.RawMessage `json:"procs"`
}

// replayed is what the ledger said of a recording.
type replayed struct {
	checked  int // pairs of checkpoint and process with memory
	failures []ledger.Failure
	wrong    []string // readings that no value of the ledger equals
}

func TestRecordedLedger(t *testing.T) {
	folder := os.Getenv("GPU_EXPORTER_RECORDINGS")
	supplied := folder == ""
	if supplied {
		folder = "testdata"
	}
	calls, err := filepath.Glob(filepath.Join(folder, "*.ioctl.jsonl.gz"))
	if err != nil || len(calls) == 0 {
		t.Fatalf("no recording in %s (%v)", folder, err)
	}
	for _, path := range calls {
		name := strings.TrimSuffix(path, ".ioctl.jsonl.gz")
		t.Run(filepath.Base(name), func(t *testing.T) {
			got := replay(t, path, name+".nvml.jsonl")
			for _, wrong := range got.wrong {
				t.Error(wrong)
			}
			t.Logf("%d readings equal, %d failed requests", got.checked, len(got.failures))
			if got.checked == 0 {
				t.Error("no checkpoint has memory: nothing was compared")
			}
			if supplied && filepath.Base(name) == "alloc-steps" {
				if got.checked != 18 {
					t.Errorf("compared %d readings, want 18", got.checked)
				}
				if len(got.failures) != 1 || got.failures[0].Size != 200<<30 || got.failures[0].PID != 432 {
					t.Errorf("failures %v, want one of 200 GiB", got.failures)
				}
			}
		})
	}
}

// TestRecordedLedgerFindsOneByte changes a recording: a replay that cannot fail would prove nothing.
func TestRecordedLedgerFindsOneByte(t *testing.T) {
	checkpoints, err := os.ReadFile("testdata/alloc-steps.nvml.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "nvml.jsonl")
	if err := os.WriteFile(path, []byte(strings.Replace(string(checkpoints), "8132755456", "8132755457", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := replay(t, "testdata/alloc-steps.ioctl.jsonl.gz", path); len(got.wrong) != 1 || !strings.Contains(got.wrong[0], "free1G") {
		t.Errorf("found %q", got.wrong)
	}
}

// TestRecordedLedgerCut replays a recording whose end is missing: what is there is compared.
func TestRecordedLedgerCut(t *testing.T) {
	zipped, err := os.ReadFile("testdata/alloc-steps.ioctl.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cut.jsonl.gz")
	if err := os.WriteFile(path, zipped[:len(zipped)*9/10], 0o644); err != nil {
		t.Fatal(err)
	}
	got := replay(t, path, "testdata/alloc-steps.nvml.jsonl")
	if len(got.wrong) != 0 || got.checked == 0 || got.checked >= 18 {
		t.Errorf("%d compared, wrong: %q", got.checked, got.wrong)
	}
}

// replay feeds a recording to a ledger and compares every checkpoint.
func replay(t *testing.T, callsPath, checkpointsPath string) replayed {
	t.Helper()
	calls, cut := readCalls(t, callsPath)
	if len(calls) == 0 {
		t.Fatal("no calls")
	}
	points := readCheckpoints(t, checkpointsPath)
	version := abi.Version{}
	for _, c := range calls {
		if v, ok := abi.UserVersion(c.Ioctl); ok {
			version = v
			break
		}
	}
	if version != (abi.Version{}) {
		if err := version.Supported(); err != nil {
			t.Fatal(err)
		}
	}
	l := ledger.New(ledger.Config{})
	var result replayed
	last := calls[len(calls)-1].Time
	cgroups := map[int32]uint64{}
	listed, gone := map[int32]bool{}, map[int32]bool{}
	lastCall := map[int32]int64{}
	for _, c := range calls {
		lastCall[c.PID] = c.Time
	}
	apply := func(c *call) {
		// A recording has no exits. The control group of a process does not change, and a library greets the driver only when it starts:
		// so both tell that a process number that NVML no longer listed, or that moved, is a new process.
		_, greets := abi.UserVersion(c.Ioctl)
		if old, ok := cgroups[c.PID]; ok && old != c.cgroup || greets && gone[c.PID] {
			l.Apply(ledger.Event{Kind: ledger.Exit, PID: c.PID, Time: c.Entry})
			delete(gone, c.PID)
		}
		cgroups[c.PID] = c.cgroup
		if e, ok := abi.Decode(version, c.Ioctl); ok {
			e.Seq = c.seq
			if f, failed := l.Apply(e); failed {
				result.failures = append(result.failures, f)
			}
		}
	}
	next := 0
	for _, point := range points {
		for next < len(calls) && calls[next].Time <= point.T0 {
			apply(&calls[next])
			next++
		}
		// Calls that were under way between t0 and t1: the driver did its work at some moment within the call.
		values := map[int32][]uint64{}
		want := map[int32]uint64{}
		for text, raw := range point.Procs {
			pid, err := strconv.ParseInt(text, 10, 32)
			if err != nil {
				t.Fatalf("checkpoint %q: process %q", point.Step, text)
			}
			want[int32(pid)] = total(t, raw)
		}
		note := func() {
			for pid := range want {
				used, _ := l.Used(pid)
				if v := values[pid]; len(v) == 0 || v[len(v)-1] != used {
					values[pid] = append(v, used)
				}
			}
		}
		// A recording has no exits. Who is listed no longer and makes no call any more has ended, and its memory is with those who mapped it.
		for pid := range listed {
			if _, ok := want[pid]; ok {
				continue
			}
			gone[pid] = true
			if lastCall[pid] <= point.T0 {
				l.Apply(ledger.Event{Kind: ledger.Exit, PID: pid, Time: point.T0})
			}
		}
		note()
		for ; next < len(calls) && calls[next].Time <= point.T1; next++ {
			apply(&calls[next])
			note()
		}
		flying := underWay(calls[next:], point.T1)
		for pid, bytes := range want {
			listed[pid] = true
			delete(gone, pid)
			if cut && point.T1 > last {
				continue // the calls before it are missing
			}
			ok := slices.Contains(values[pid], bytes)
			if !ok && len(flying[pid]) > 0 {
				ok = reachable(l, version, pid, flying[pid], bytes)
			}
			if !ok {
				result.wrong = append(result.wrong, fmt.Sprintf("checkpoint %q at %d: process %d has %d bytes, the ledger had %v", point.Step, point.T0, pid, bytes, values[pid]))
			}
			if bytes > 0 {
				result.checked++ // not reached where the calls are missing
			}
		}
	}
	for ; next < len(calls); next++ {
		apply(&calls[next])
	}
	for _, pid := range l.Processes(nil) {
		l.Apply(ledger.Event{Kind: ledger.Exit, PID: pid, Time: last})
	}
	if s := l.Stats(); s.Objects != 0 || s.Clients != 0 || s.Processes != 0 {
		t.Errorf("after every exit the ledger still has %+v", s)
	}
	return result
}

// underWay returns the calls that had begun at a moment and were not complete, by process.
func underWay(calls []call, at int64) map[int32][]*call {
	found := map[int32][]*call{}
	for i := range calls {
		if calls[i].Entry <= at {
			found[calls[i].PID] = append(found[calls[i].PID], &calls[i])
		}
		if calls[i].Time > at+10e9 {
			break // no call takes longer
		}
	}
	return found
}

// reachable tells whether some of the calls under way, done already, make the ledger's sum what NVML said. The state is not changed:
// the sizes of the requests and of the objects freed are added up.
func reachable(l *ledger.Ledger, version abi.Version, pid int32, flying []*call, want uint64) bool {
	used, _ := l.Used(pid)
	sums := []int64{int64(used)}
	for _, c := range flying {
		e, ok := abi.Decode(version, c.Ioctl)
		if !ok || !ledger.Succeeded(e.Status) || len(sums) > 1<<12 {
			continue
		}
		var change int64
		switch e.Kind {
		case ledger.Memory:
			change = int64(e.Size)
		case ledger.Free:
			change = -int64(l.Held(e.Client, e.Handle))
		}
		if change != 0 {
			for _, s := range sums {
				sums = append(sums, s+change)
			}
		}
	}
	return slices.Contains(sums, int64(want))
}

// call is a decoded line.
type call struct {
	abi.Ioctl
	cgroup uint64
	seq    uint64
}

// readCalls reads a recording, sorted by completion. A file that is cut short gives what it has.
func readCalls(t *testing.T, path string) (calls []call, cut bool) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(unzipped)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			t.Logf("%s ends within line %d: %v", path, number, err)
			cut = true
			break
		}
		if len(line) > 1 {
			c, parseErr := parseCall(line)
			if parseErr != nil && err != nil {
				t.Logf("%s ends within line %d", path, number)
				cut = true
				break
			}
			if parseErr != nil {
				t.Fatalf("%s:%d: %v", path, number, parseErr)
			}
			calls = append(calls, c)
		}
		if err != nil {
			break
		}
	}
	slices.SortStableFunc(calls, func(a, b call) int { return cmp.Compare(a.Entry, b.Entry) })
	perThread := map[int32]uint64{}
	for i := range calls {
		perThread[calls[i].TID]++
		calls[i].seq = perThread[calls[i].TID]
	}
	slices.SortStableFunc(calls, func(a, b call) int { return cmp.Compare(a.Time, b.Time) })
	return calls, cut
}

func parseCall(line []byte) (call, error) {
	var r recordedCall
	if err := json.Unmarshal(line, &r); err != nil {
		return call{}, err
	}
	cmd, err := strconv.ParseUint(r.Cmd, 0, 32)
	if err != nil {
		return call{}, err
	}
	c := call{cgroup: r.CG}
	c.Ioctl = abi.Ioctl{Entry: r.TS, Time: r.TS + r.Dur, PID: r.TGID, TID: r.TID, Cmd: uint32(cmd), Ret: r.Ret}
	if !strings.HasPrefix(r.Rdev, "195:") {
		c.Node = abi.NodeUVM
	}
	for _, part := range []struct {
		to   *[]byte
		text string
	}{{&c.In, r.In}, {&c.Out, r.Out}, {&c.Deep, r.Deep}} {
		if *part.to, err = hex.DecodeString(part.text); err != nil {
			return call{}, err
		}
	}
	return c, nil
}

func readCheckpoints(t *testing.T, path string) []checkpoint {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var points []checkpoint
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	for i, line := range lines {
		var p checkpoint
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			if i == len(lines)-1 {
				t.Logf("%s ends within line %d", path, i+1)
				break
			}
			t.Fatalf("%s:%d: %v", path, i+1, err)
		}
		points = append(points, p)
	}
	slices.SortStableFunc(points, func(a, b checkpoint) int { return cmp.Compare(a.T0, b.T0) })
	return points
}

// total reads a number, or adds up an object of numbers.
func total(t *testing.T, raw json.RawMessage) uint64 {
	t.Helper()
	var one uint64
	if json.Unmarshal(raw, &one) == nil {
		return one
	}
	var many map[string]uint64
	if err := json.Unmarshal(raw, &many); err != nil {
		t.Fatalf("bytes of a process: %s", raw)
	}
	for _, n := range many {
		one += n
	}
	return one
}
