package assets_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"gpu-exporter/exporter/why"
)

// explained are the alerts about GPUs and containers, with the causes that `gpu-exporter why` finds for them: of corrected
// errors none, for they hold nobody back.
var explained = map[string][]*why.Cause{
	"GPUContainerMemoryHigh": {why.MemoryFull}, "GPUDeviceMemoryHigh": {why.MemoryFull}, "GPUMemoryFullButIdle": {why.Idling}, "GPUAssignedButIdle": {why.Idling, why.NotUsed},
	"GPUAllocationFailures": {why.AllocFailed}, "GPUContainerPCIeHog": {why.CopyBound, why.TakesLink}, "GPUTemperatureCritical": {why.Hot}, "GPUTemperatureHigh": {why.Hot},
	"GPUECCVolatile": {why.Uncorrected}, "GPUECCUncorrected": {why.Uncorrected}, "GPUECCCorrected": nil, "GPURowRemap": {why.Remap}, "GPUXidFatal": {why.XidFatal},
	"GPUXidApplication": {why.XidProgram}, "GPUXidOther": {why.XidOther}, "GPUThrottled": {why.Hot, why.Slowed}, "GPULost": {why.Lost}, "GPUOpensFail": {why.NoAccess},
}

// TestAlertsExplain: an alert says what to do in the words of `gpu-exporter why`, names that command, and takes the same Xids for what they are.
func TestAlertsExplain(t *testing.T) {
	n := 0
	for _, r := range rules(t) {
		if r.Alert == "" || strings.HasPrefix(r.Alert, "GPUExporter") {
			continue
		}
		n++
		text := strings.Join(strings.Fields(r.Annotations["description"]), " ")
		name := "NAME"
		if strings.Contains(text, "$labels.container_name") {
			name = "{{ $labels.container_name }}"
		}
		if !strings.Contains(text, "`gpu-exporter why "+name+"` on that host ") {
			t.Errorf("%s names no `gpu-exporter why %s`", r.Alert, name)
		}
		if _, ok := explained[r.Alert]; !ok {
			t.Errorf("%s has no cause", r.Alert)
		}
		for _, c := range explained[r.Alert] {
			if !strings.Contains(strings.ToLower(text), strings.ToLower(c.Advice)) {
				t.Errorf("%s says what to do in other words than %s:\n%s\n%s", r.Alert, c.Name, text, c.Advice)
			}
		}
		for alert, xids := range map[string][]uint64{"GPUXidFatal": why.FatalXids, "GPUXidApplication": why.ProgramXids} {
			if r.Alert != alert {
				continue
			}
			list := regexp.MustCompile(`xid=~"([0-9|]+)"`).FindStringSubmatch(r.Expr)
			if want := strings.ReplaceAll(strings.Trim(fmt.Sprint(xids), "[]"), " ", "|"); list == nil || list[1] != want {
				t.Errorf("%s is for %v, why for %s", alert, list, want)
			}
		}
	}
	if n != len(explained) {
		t.Errorf("%d alerts, %d with a cause", n, len(explained))
	}
}
