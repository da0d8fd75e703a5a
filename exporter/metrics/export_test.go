package metrics

import (
	"fmt"
	"strings"
)

// Families lists every family of the contract as "name type label,label…".
func Families() []string {
	list := []string{"gpu_exporter_series gauge", "gpu_exporter_series_limit gauge", "gpu_exporter_series_left_out gauge"}
	add := func(f family, kind string) {
		list = append(list, strings.TrimSpace(fmt.Sprintf("%s %s %s", f.name, kind, strings.Join(f.labels, ","))))
	}
	for _, f := range families {
		kind := "gauge"
		if f.counter {
			kind = "counter"
		}
		add(f, kind)
	}
	for _, f := range histograms {
		kind := "histogram"
		if f.name == "gpu_exporter_nvml_call_duration_seconds" {
			kind = "summary"
		}
		add(f, kind)
	}
	return list
}
