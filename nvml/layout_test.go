package nvml

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"gpu-exporter/nvml/fake"
)

// headerModule carries NVIDIA's own nvml.h. It is read, never linked.
const headerModule = "github.com/NVIDIA/go-nvml@v0.13.4-1"

// header returns the path of NVIDIA's header in the module cache.
func header(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", headerModule)
	cmd.Dir = t.TempDir() // outside this module, so that its go.sum stays as it is
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var m struct{ Dir, Error string }
	if jerr := json.Unmarshal(out, &m); jerr != nil || m.Error != "" || err != nil {
		t.Fatalf("getting %s for its nvml.h (is the module proxy reachable?): %v %s %s", headerModule, err, m.Error, stderr.String())
	}
	for _, p := range []string{"gen/nvml/nvml.h", "pkg/nvml/nvml.h"} {
		if path := filepath.Join(m.Dir, p); exists(path) {
			return path
		}
	}
	t.Fatalf("%s has no nvml.h", m.Dir)
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

type member struct {
	name   string
	offset uintptr
}

type layoutOf struct {
	c       string
	size    uintptr
	members []member
}

// layouts lists every struct that crosses the boundary, by the header's names.
func layouts() []layoutOf {
	var (
		util  utilization
		m1    memoryV1
		m2    memoryV2
		bar1  bar1Memory
		pci   pciInfo
		attr  deviceAttributes
		vt    violationTime
		fv    fieldValue
		p1    processInfoV1
		p2    processInfoV2
		smp   sample
		pu    processUtilization
		ev    eventData
		gm    gpmMetric
		gg    gpmMetricsGet
		gs    gpmSupport
		sizes = func(v ...member) []member { return v }
	)
	return []layoutOf{
		{"nvmlUtilization_t", unsafe.Sizeof(util), sizes(member{"gpu", unsafe.Offsetof(util.gpu)}, member{"memory", unsafe.Offsetof(util.memory)})},
		{"nvmlMemory_t", unsafe.Sizeof(m1), sizes(member{"total", unsafe.Offsetof(m1.total)}, member{"free", unsafe.Offsetof(m1.free)}, member{"used", unsafe.Offsetof(m1.used)})},
		{"nvmlMemory_v2_t", unsafe.Sizeof(m2), sizes(member{"version", unsafe.Offsetof(m2.version)}, member{"total", unsafe.Offsetof(m2.total)},
			member{"reserved", unsafe.Offsetof(m2.reserved)}, member{"free", unsafe.Offsetof(m2.free)}, member{"used", unsafe.Offsetof(m2.used)})},
		{"nvmlBAR1Memory_t", unsafe.Sizeof(bar1), sizes(member{"bar1Total", unsafe.Offsetof(bar1.total)}, member{"bar1Free", unsafe.Offsetof(bar1.free)},
			member{"bar1Used", unsafe.Offsetof(bar1.used)})},
		{"nvmlPciInfo_t", unsafe.Sizeof(pci), sizes(member{"busIdLegacy", unsafe.Offsetof(pci.busIDLegacy)}, member{"domain", unsafe.Offsetof(pci.domain)},
			member{"bus", unsafe.Offsetof(pci.bus)}, member{"device", unsafe.Offsetof(pci.device)}, member{"pciDeviceId", unsafe.Offsetof(pci.deviceID)},
			member{"pciSubSystemId", unsafe.Offsetof(pci.subSystemID)}, member{"busId", unsafe.Offsetof(pci.busID)})},
		{"nvmlDeviceAttributes_t", unsafe.Sizeof(attr), sizes(member{"multiprocessorCount", unsafe.Offsetof(attr.multiprocessorCount)},
			member{"gpuInstanceSliceCount", unsafe.Offsetof(attr.gpuInstanceSliceCount)},
			member{"computeInstanceSliceCount", unsafe.Offsetof(attr.computeInstanceSliceCount)}, member{"memorySizeMB", unsafe.Offsetof(attr.memorySizeMB)})},
		{"nvmlViolationTime_t", unsafe.Sizeof(vt), sizes(member{"referenceTime", unsafe.Offsetof(vt.reference)}, member{"violationTime", unsafe.Offsetof(vt.violation)})},
		{"nvmlFieldValue_t", unsafe.Sizeof(fv), sizes(member{"fieldId", unsafe.Offsetof(fv.fieldID)}, member{"scopeId", unsafe.Offsetof(fv.scopeID)},
			member{"timestamp", unsafe.Offsetof(fv.timestamp)}, member{"latencyUsec", unsafe.Offsetof(fv.latency)},
			member{"valueType", unsafe.Offsetof(fv.valueType)}, member{"nvmlReturn", unsafe.Offsetof(fv.nvmlReturn)}, member{"value", unsafe.Offsetof(fv.value)})},
		{"nvmlProcessInfo_v1_t", unsafe.Sizeof(p1), sizes(member{"pid", unsafe.Offsetof(p1.pid)}, member{"usedGpuMemory", unsafe.Offsetof(p1.used)})},
		{"nvmlProcessInfo_v2_t", unsafe.Sizeof(p2), sizes(member{"pid", unsafe.Offsetof(p2.pid)}, member{"usedGpuMemory", unsafe.Offsetof(p2.used)},
			member{"gpuInstanceId", unsafe.Offsetof(p2.gpuInstanceID)}, member{"computeInstanceId", unsafe.Offsetof(p2.computeInstanceID)})},
		{"nvmlProcessInfo_t", unsafe.Sizeof(p2), nil},
		{"nvmlSample_t", unsafe.Sizeof(smp), sizes(member{"timeStamp", unsafe.Offsetof(smp.timestamp)}, member{"sampleValue", unsafe.Offsetof(smp.value)})},
		{"nvmlProcessUtilizationSample_t", unsafe.Sizeof(pu), sizes(member{"pid", unsafe.Offsetof(pu.pid)}, member{"timeStamp", unsafe.Offsetof(pu.timestamp)},
			member{"smUtil", unsafe.Offsetof(pu.sm)}, member{"memUtil", unsafe.Offsetof(pu.mem)}, member{"encUtil", unsafe.Offsetof(pu.enc)},
			member{"decUtil", unsafe.Offsetof(pu.dec)})},
		{"nvmlEventData_t", unsafe.Sizeof(ev), sizes(member{"device", unsafe.Offsetof(ev.device)}, member{"eventType", unsafe.Offsetof(ev.eventType)},
			member{"eventData", unsafe.Offsetof(ev.eventData)}, member{"gpuInstanceId", unsafe.Offsetof(ev.gpuInstanceID)},
			member{"computeInstanceId", unsafe.Offsetof(ev.computeInstanceID)})},
		{"nvmlGpmMetric_t", unsafe.Sizeof(gm), sizes(member{"metricId", unsafe.Offsetof(gm.metricID)}, member{"nvmlReturn", unsafe.Offsetof(gm.nvmlReturn)},
			member{"value", unsafe.Offsetof(gm.value)})},
		{"nvmlGpmMetricsGet_t", unsafe.Sizeof(gg), sizes(member{"version", unsafe.Offsetof(gg.version)}, member{"numMetrics", unsafe.Offsetof(gg.numMetrics)},
			member{"sample1", unsafe.Offsetof(gg.sample1)}, member{"sample2", unsafe.Offsetof(gg.sample2)}, member{"metrics", unsafe.Offsetof(gg.metrics)})},
		{"nvmlGpmSupport_t", unsafe.Sizeof(gs), sizes(member{"version", unsafe.Offsetof(gs.version)}, member{"isSupportedDevice", unsafe.Offsetof(gs.supported)})},
	}
}

// constants are the header's names of the numbers that this package and its users pass.
var constants = map[string]uint64{
	"NVML_STRUCT_VERSION(Memory, 2)": uint64(structVersion(unsafe.Sizeof(memoryV2{}), 2)),
	"NVML_GPM_METRICS_GET_VERSION":   1, "NVML_GPM_SUPPORT_VERSION": 1, "NVML_GPM_METRIC_MAX": gpmMetricMax,
	"NVML_FI_DEV_MEMORY_TEMP": FieldMemoryTemp, "NVML_FI_DEV_PCIE_COUNT_TX_BYTES": FieldPCIeTxBytes, "NVML_FI_DEV_PCIE_COUNT_RX_BYTES": FieldPCIeRxBytes,
	"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": FieldNVLinkDataTx, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": FieldNVLinkDataRx,
	"NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES": FieldNVLinkXmitBytes, "NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES": FieldNVLinkRcvBytes,
	"NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP": FieldThrottlePower, "NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST": FieldThrottleSyncBoost,
	"NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": FieldThrottleSWThermal, "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": FieldThrottleHWThermal,
	"NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": FieldThrottlePowerBrake,
	"NVML_TOTAL_POWER_SAMPLES":                                SamplesPower, "NVML_GPU_UTILIZATION_SAMPLES": SamplesUtilization,
	"NVML_CLOCK_GRAPHICS": ClockGraphics, "NVML_CLOCK_SM": ClockSM, "NVML_CLOCK_MEM": ClockMemory, "NVML_CLOCK_VIDEO": ClockVideo,
	"NVML_TEMPERATURE_GPU": 0, "NVML_TEMPERATURE_THRESHOLD_SHUTDOWN": ThresholdShutdown, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": ThresholdSlowdown,
	"NVML_MEMORY_ERROR_TYPE_CORRECTED": 0, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0, "NVML_AGGREGATE_ECC": 1,
	"NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS": 0, "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR": 1,
	"NVML_PCIE_UTIL_TX_BYTES": 0, "NVML_PCIE_UTIL_RX_BYTES": 1, "NVML_FEATURE_DISABLED": 0, "NVML_FEATURE_ENABLED": 1,
	"NVML_COMPUTEMODE_DEFAULT": 0, "NVML_COMPUTEMODE_EXCLUSIVE_THREAD": 1, "NVML_COMPUTEMODE_PROHIBITED": 2, "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": 3,
	"NVML_PSTATE_UNKNOWN": 32, "NVML_PSTATE_15": 15,
	"NVML_NVLINK_ERROR_DL_REPLAY": NvLinkReplay, "NVML_NVLINK_ERROR_DL_RECOVERY": NvLinkRecovery, "NVML_NVLINK_ERROR_DL_CRC_FLIT": NvLinkCRCFlit,
	"NVML_NVLINK_ERROR_DL_CRC_DATA":  NvLinkCRCData,
	"nvmlEventTypeSingleBitEccError": EventSingleBitECC, "nvmlEventTypeDoubleBitEccError": EventDoubleBitECC, "nvmlEventTypeXidCriticalError": EventXid,
	"NVML_GPM_METRIC_GRAPHICS_UTIL": GPMGraphics, "NVML_GPM_METRIC_SM_UTIL": GPMSM, "NVML_GPM_METRIC_SM_OCCUPANCY": GPMOccupancy,
	"NVML_GPM_METRIC_ANY_TENSOR_UTIL": GPMTensor, "NVML_GPM_METRIC_DRAM_BW_UTIL": GPMDRAM, "NVML_GPM_METRIC_FP64_UTIL": GPMFP64,
	"NVML_GPM_METRIC_FP32_UTIL": GPMFP32, "NVML_GPM_METRIC_FP16_UTIL": GPMFP16, "NVML_GPM_METRIC_PCIE_TX_PER_SEC": GPMPCIeTx,
	"NVML_GPM_METRIC_PCIE_RX_PER_SEC": GPMPCIeRx, "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": GPMNVLinkRx, "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": GPMNVLinkTx,
	"NVML_VALUE_TYPE_DOUBLE": 0, "NVML_VALUE_TYPE_UNSIGNED_INT": 1, "NVML_VALUE_TYPE_UNSIGNED_LONG": 2, "NVML_VALUE_TYPE_UNSIGNED_LONG_LONG": 3,
	"NVML_VALUE_TYPE_SIGNED_LONG_LONG": 4, "NVML_VALUE_TYPE_SIGNED_INT": 5, "NVML_VALUE_TYPE_UNSIGNED_SHORT": 6,
}

// probe compiles a C program against an include file and returns the numbers that it prints, by expression.
func probe(t *testing.T, include string, expressions []string) map[string]uint64 {
	t.Helper()
	dir := t.TempDir()
	var b strings.Builder
	fmt.Fprintf(&b, "#define NVML_NO_UNVERSIONED_FUNC_DEFS\n#include <stddef.h>\n#include <stdio.h>\n#include \"%s\"\nint main(void) {\n", include)
	for _, e := range expressions {
		fmt.Fprintf(&b, "printf(\"%%llu %s\\n\", (unsigned long long)(%s));\n", e, e)
	}
	b.WriteString("return 0; }\n")
	src, bin := filepath.Join(dir, "probe.c"), filepath.Join(dir, "probe")
	if err := os.WriteFile(src, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	gcc(t, "-w", "-o", bin, src)
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatalf("running the probe: %v", err)
	}
	got := map[string]uint64{}
	for line := range strings.Lines(string(out)) {
		value, e, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			t.Fatalf("the probe printed %q", line)
		}
		got[e] = n
	}
	if len(got) != len(expressions) {
		t.Fatalf("the probe printed %d numbers, want %d", len(got), len(expressions))
	}
	return got
}

func gcc(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func layoutExpressions() (want map[string]uint64, order []string) {
	want = map[string]uint64{}
	add := func(e string, v uintptr) {
		want[e] = uint64(v)
		order = append(order, e)
	}
	for _, l := range layouts() {
		add("sizeof("+l.c+")", l.size)
		for _, m := range l.members {
			add("offsetof("+l.c+", "+m.name+")", m.offset)
		}
	}
	return want, order
}

// TestLayoutAgainstHeader compares sizes and offsets of every struct, and every number passed, with NVIDIA's header; those of the fake
// library too.
func TestLayoutAgainstHeader(t *testing.T) {
	want, order := layoutExpressions()
	fakeSource := t.TempDir()
	if err := fake.Extract(fakeSource); err != nil {
		t.Fatal(err)
	}
	nvidia := header(t)
	for name, include := range map[string]string{"header": nvidia, "fake": filepath.Join(fakeSource, "abi.h")} {
		for e, got := range probe(t, include, order) {
			if got != want[e] {
				t.Errorf("%s: %s is %d, in Go %d", name, e, got, want[e])
			}
		}
	}

	order = order[:0]
	all := map[string]uint64{}
	for e, v := range constants {
		all[e] = v
	}
	for r, n := range returnNames {
		switch r {
		case Success:
			all["NVML_SUCCESS"] = 0
		case ErrNoValue: // ours, not NVML's
		default:
			all["NVML_ERROR_"+n] = uint64(r)
		}
	}
	for v, n := range architectures {
		all["NVML_DEVICE_ARCH_"+strings.ToUpper(n)] = uint64(v)
	}
	for e := range all {
		order = append(order, e)
	}
	for e, got := range probe(t, nvidia, order) {
		if got != all[e] {
			t.Errorf("%s is %d, in Go %d", e, got, all[e])
		}
	}
}

// TestHeaderErrorsAreNamed looks for error codes in the header that this package has no name for.
func TestHeaderErrorsAreNamed(t *testing.T) {
	b, err := os.ReadFile(header(t))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^\s+NVML_ERROR_(\w+)\s*=\s*(\d+)`).FindAllSubmatch(b, -1)
	if len(found) < 25 {
		t.Fatalf("only %d error codes in the header", len(found))
	}
	for _, f := range found {
		n, _ := strconv.Atoi(string(f[2]))
		if got := Return(n).Name(); got != string(f[1]) {
			t.Errorf("code %d is %s, here %s", n, f[1], got)
		}
	}
}

// TestSymbolsAreInHeader compiles a reference to every name that is looked up.
func TestSymbolsAreInHeader(t *testing.T) {
	var e []string
	for _, s := range Symbols() {
		e = append(e, "sizeof(&"+s+")")
	}
	for s, n := range probe(t, header(t), e) {
		if n != uint64(unsafe.Sizeof(uintptr(0))) {
			t.Errorf("%s is %d", s, n)
		}
	}
}

// TestFakeCompilesAgainstHeader lets the compiler compare each of the fake's functions with NVIDIA's prototype, and its use of each struct.
func TestFakeCompilesAgainstHeader(t *testing.T) {
	dir := t.TempDir()
	if err := fake.Extract(dir); err != nil {
		t.Fatal(err)
	}
	gcc(t, "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", "-Wno-deprecated-declarations", "-Wno-enum-compare",
		"-DFAKE_REAL_HEADER=\""+header(t)+"\"", filepath.Join(dir, "nvml.c"))
}
