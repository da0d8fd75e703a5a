package view

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
)

func sample() *snapshot.Snapshot {
	owner := containers.Container{ID: strings.Repeat("a", 64), Name: "train", Image: "img", Started: time.Unix(100, 0).UTC()}
	return &snapshot.Snapshot{Time: time.Unix(200, 0).UTC(), Host: input.Host{Name: "h", IP: "192.0.2.1", KernelVersion: "6.18", BootID: "b", Capabilities: "1ff"},
		Sources: map[string]input.Source{"nvml": {Name: "nvml", Up: true}, "docker": {Name: "docker", Reason: "no socket"}},
		Devices: []snapshot.Device{
			{Index: 0, UUID: "GPU-0", State: frame.StateOK, Info: frame.Info{Name: "H"}, Load: &frame.Load{MemoryUsed: frame.Some[uint64](30), Utilization: frame.Some(0.0), Throttle: frame.Some[uint64](5)}},
			{Index: 3, UUID: "GPU-3", State: frame.StateLost, Reason: "gone", Energy: frame.Some(7.0)}},
		Workloads: []snapshot.Workload{
			{Device: 0, PID: 10, Alive: true, Container: owner, Memory: frame.Some[uint64](10), Peak: frame.Some[uint64](12), Allocated: frame.Some[uint64](9), HtoD: frame.Some[uint64](5), DtoH: frame.Some[uint64](0), Energy: frame.Some(2.5), Utilization: frame.Some(60.0)},
			{Device: 0, PID: 11, Alive: true, Container: owner, Memory: frame.Some[uint64](20)},
			{Device: 0, PID: 12, Container: owner, Busy: frame.Some(1.0)}, // gone
			{Device: 0, Alive: true, Memory: frame.Some[uint64](0)}},
		Containers: []snapshot.Container{{Container: owner, Assigned: []containers.Assignment{{UUID: "GPU-0", Source: containers.SourceEnv}}, Processes: map[string]int{"GPU-0": 2}}},
		Activity: []snapshot.Activity{{Container: owner, Counts: &snapshot.Counts{Refused: time.Unix(150, 0).UTC(),
			Opens: map[snapshot.OpenKind]uint64{{Node: "ctl", Result: "eperm"}: 2, {Node: "gpu", Result: "eacces"}: 1, {Node: "gpu", Result: "ok"}: 5}}}}}
}

// TestJSON: the names are those that programs rely on, what is absent is not there, and zero is.
func TestJSON(t *testing.T) {
	b, err := json.Marshal(New(sample()))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"time":"1970-01-01T00:03:20Z","host":{"name":"h","ip":"192.0.2.1","kernel":"6.18","boot_id":"b","capabilities":"1ff"},"driver":{},` +
		`"sources":[{"name":"docker","up":false,"reason":"no socket"},{"name":"nvml","up":true}],` +
		`"devices":[{"index":0,"uuid":"GPU-0","name":"H","state":"ok","utilization_percent":0,"memory_used_bytes":30,"throttle_reasons":["gpu_idle","sw_power_cap"]},` +
		`{"index":3,"uuid":"GPU-3","state":"lost","reason":"gone","energy_joules_total":7}],` +
		`"workloads":[{"gpu":0,"gpu_uuid":"GPU-0","pid":10,"container_id":"ID","container_name":"train","image":"img","memory_used_bytes":10,"memory_peak_bytes":12,"memory_allocated_bytes":9,"pcie_host_to_device_bytes_total":5,"pcie_device_to_host_bytes_total":0,"energy_joules_total":2.5,"utilization_percent":60},` +
		`{"gpu":0,"gpu_uuid":"GPU-0","pid":11,"container_id":"ID","container_name":"train","image":"img","memory_used_bytes":20},` +
		`{"gpu":0,"gpu_uuid":"GPU-0","memory_used_bytes":0}],` +
		`"containers":[{"id":"ID","name":"train","image":"img","started":"1970-01-01T00:01:40Z","assigned":[{"gpu_uuid":"GPU-0","source":"env"}],` +
		`"processes":{"GPU-0":2},"refused_opens_total":3,"access_lost":"1970-01-01T00:02:30Z","utilization_percent":60,"memory_used_bytes":30}]}`
	if got := strings.ReplaceAll(string(b), strings.Repeat("a", 64), "ID"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var back Snapshot
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if v := New(sample()); !reflect.DeepEqual(*v, back) {
		t.Errorf("read back: %+v\nwant %+v", back, *v)
	}
}

// TestRestarted: access that was lost before the container started anew is not lost.
func TestRestarted(t *testing.T) {
	s := sample()
	s.Containers[0].Started = time.Unix(160, 0)
	if c := New(s).Containers[0]; !c.AccessLost.IsZero() || c.RefusedOpens != 3 {
		t.Errorf("%+v", c)
	}
}

// TestEmpty: an empty snapshot has lists, not nulls.
func TestEmpty(t *testing.T) {
	b, err := json.Marshal(New(&snapshot.Snapshot{}))
	if err != nil || strings.Contains(string(b), "null") {
		t.Errorf("%s, %v", b, err)
	}
}
