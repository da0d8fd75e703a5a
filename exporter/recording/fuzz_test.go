package recording

import (
	"bytes"
	"compress/gzip"
	"testing"
	"time"

	"gpu-exporter/exporter/snapshot"
)

// FuzzRead: whatever lines a file has, reading it ends with inputs or an error, and the snapshot takes what was read.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"time":1,"host":{"ip":"192.0.2.1","name":"a","self":[1]}}` + "\n" + `{"time":2,"source":{"name":"nvml","up":true}}`))
	f.Add([]byte(`{"time":3,"frame":{"v":1,"time":2,"device":{"index":0,"uuid":"GPU-0","state":"ok","load":{"utilization":3},"processes":{"list":[{"pid":1,"memory_used":5}]}}}}`))
	f.Add([]byte(`{"time":4,"tracer":{"time":4,"mode":"tracepoint","processes":[{"pid":1,"start_time":2,"compute":true,"devices":[{"uuid":"GPU-0","used":7}]}],"groups":[{"cgroup":"/x","calls":[{"name":"a","n":1,"buckets":[1]}]}]}}`))
	f.Add([]byte(`{"time":5,"containers":{"list":[{"id":"a"}]}}` + "\n{"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		z.Write(text)
		z.Close()
		list, err := Read(&b)
		if (err == nil) == (len(list) == 0) {
			t.Fatalf("%d inputs and the error %v", len(list), err)
		}
		s := snapshot.NewBuilder(snapshot.Config{})
		for _, in := range list {
			s.Apply(Shift(in, 5))
			s.Snapshot(time.Unix(0, in.Time))
		}
	})
}

// FuzzFile: bytes that are no recording are an error.
func FuzzFile(f *testing.F) {
	f.Add(Demo[:1000])
	f.Add([]byte("not gzip"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if list, err := Read(bytes.NewReader(b)); (err == nil) == (len(list) == 0) {
			t.Fatalf("%d inputs and the error %v", len(list), err)
		}
	})
}
