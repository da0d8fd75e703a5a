package metrics

import (
	"fmt"
	"strings"
)

// Families lists every family of the contract as "name type label,label…"; the two of calls are made apart.
func Families() []string {
	list := []string{"gpu_exporter_nvml_call_duration_seconds summary call",
		"gpu_driver_call_duration_seconds histogram " + strings.Join(with(containerLabels, "call"), ",")}
	for _, f := range families {
		kind := "gauge"
		if f.counter {
			kind = "counter"
		}
		list = append(list, strings.TrimSpace(fmt.Sprintf("%s %s %s", f.name, kind, strings.Join(f.labels, ","))))
	}
	return list
}
