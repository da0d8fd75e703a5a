package nvml

import (
	"fmt"
	"os"
	"testing"

	"gpu-exporter/nvml/fake"
)

// childEnv makes this test binary act as another program: see TestMain.
const childEnv = "NVML_TEST_CHILD"

// TestMain runs the tests, or what a test wants done in a process of its own: there the library may crash, and the environment is fresh.
func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "":
		os.Exit(m.Run())
	case "temperature": // print the first device's temperature, or the error
		l, err := Open(Config{Path: os.Getenv("NVML_TEST_LIBRARY")})
		if err == nil {
			err = l.Init()
		}
		var d *Device
		if err == nil {
			d, err = l.DeviceGetHandleByIndex(0)
		}
		var t float64
		if err == nil {
			t, err = d.GetTemperature()
		}
		fmt.Println(t, err)
		os.Exit(0)
	}
	os.Exit(3)
}

// host opens a library that plays s and lacks the functions named.
func host(t testing.TB, s fake.Scenario, without ...string) (*fake.Host, *Library) {
	t.Helper()
	h := fake.Install(t, s, without...)
	l, err := Open(Config{Path: h.Library})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Shutdown() })
	return h, l
}

func device(t testing.TB, l *Library, index int) *Device {
	t.Helper()
	d, err := l.DeviceGetHandleByIndex(index)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// busyH200 is a device with a value for everything that can be asked.
func busyH200() fake.GPU {
	g := fake.H200(0)
	g.Set("utilization", 87, 41)
	g.Set("memory", uint64(150754820096), 644939776, 5<<30)
	g.Set("bar1", 256<<30, 3<<20)
	g.Set("temperature", 64)
	g.Set("temperature_threshold", 92, 89)
	g.Set("power", 543210)
	g.Set("energy", 3_600_500)
	g.Set("clock", 1980, 1975, 3201, 1500)
	g.Set("throttle", 0x4)
	g.Set("violation", 1_500_000_000, 2_000_000_000)
	g.Set("encoder", 11)
	g.Set("decoder", 12)
	g.Set("jpeg", 13)
	g.Set("ofa", 14)
	g.Set("ecc", 1, 2, 3, 4)
	g.Set("retired_pages", 5, 6)
	g.Set("retired_pending", 1)
	g.Set("remapped_rows", 7, 8, 1, 0)
	g.Set("fans", 2)
	g.Set("fan_speed", 30, 35)
	g.Set("pcie_generation", 4)
	g.Set("pcie_width", 8)
	g.Set("pcie_replays", 9)
	g.Set("pcie_throughput", 1000, 2000)
	g.Set("encoder_sessions", 3)
	g.Set("serial", "1654023012345")
	g.NVLinks = []fake.NVLink{{Link: 0, Active: true, Replay: 1, Recovery: 2, CRCFlit: 3, CRCData: 4}, {Link: 1}}
	g.GPM[GPMSM] = 87.5
	g.GPM[GPMPCIeRx] = 1024
	g.Fields = append(g.Fields, fake.Field{ID: FieldNVLinkDataTx, Scope: 0, Type: 3, Value: "4096"}, fake.Field{ID: 900, Type: 1, Value: "5"})
	g.Processes = []fake.Process{{PID: 4242, Memory: 1 << 30}, {PID: 4343, Memory: 2 << 30, Graphics: true}}
	return g
}

// query is one call on a device, for the tests that treat all calls alike.
type query struct {
	name     string
	function string // the symbol that a fault names
	bits     int    // width of what the driver answers; 0 for text and lists
	call     func(d *Device) (any, error)
	want     any // for busyH200
}

type pair struct{ a, b any }

func queries() []query {
	pairOf := func(a, b any, err error) (any, error) { return pair{a, b}, err }
	one := func(v any, err error) (any, error) { return v, err }
	return []query{
		{"uuid", "nvmlDeviceGetUUID", 0, func(d *Device) (any, error) { return one(d.GetUUID()) }, "GPU-c0ffee00-0000-4000-8000-000000000000"},
		{"name", "nvmlDeviceGetName", 0, func(d *Device) (any, error) { return one(d.GetName()) }, "NVIDIA H200"},
		{"serial", "nvmlDeviceGetSerial", 0, func(d *Device) (any, error) { return one(d.GetSerial()) }, "1654023012345"},
		{"vbios", "nvmlDeviceGetVbiosVersion", 0, func(d *Device) (any, error) { return one(d.GetVbiosVersion()) }, "96.00.BC.00.01"},
		{"pci", "nvmlDeviceGetPciInfo_v3", 0, func(d *Device) (any, error) { return one(d.GetPciBusID()) }, "0000:0a:00.0"},
		{"minor", "nvmlDeviceGetMinorNumber", 32, func(d *Device) (any, error) { return one(d.GetMinorNumber()) }, 7},
		{"architecture", "nvmlDeviceGetArchitecture", 32, func(d *Device) (any, error) { return one(d.GetArchitecture()) }, "hopper"},
		{"capability", "nvmlDeviceGetCudaComputeCapability", 32, func(d *Device) (any, error) { return pairOf(d.GetCudaComputeCapability()) }, pair{9, 0}},
		{"persistence", "nvmlDeviceGetPersistenceMode", 32, func(d *Device) (any, error) { return one(d.GetPersistenceMode()) }, true},
		{"compute mode", "nvmlDeviceGetComputeMode", 32, func(d *Device) (any, error) { return one(d.GetComputeMode()) }, "default"},
		{"memory", "nvmlDeviceGetMemoryInfo_v2", 64, func(d *Device) (any, error) { return one(d.GetMemoryInfo()) },
			Memory{Total: 150754820096, Used: 5 << 30, Free: 150754820096 - 644939776 - 5<<30, Reserved: 644939776, HasReserved: true}},
		{"bar1", "nvmlDeviceGetBAR1MemoryInfo", 64, func(d *Device) (any, error) { return pairOf(d.GetBAR1MemoryInfo()) }, pair{uint64(3 << 20), uint64(256 << 30)}},
		{"utilization", "nvmlDeviceGetUtilizationRates", 32, func(d *Device) (any, error) { return pairOf(d.GetUtilizationRates()) }, pair{87.0, 41.0}},
		{"encoder", "nvmlDeviceGetEncoderUtilization", 32, func(d *Device) (any, error) { return one(d.GetEncoderUtilization()) }, 11.0},
		{"decoder", "nvmlDeviceGetDecoderUtilization", 32, func(d *Device) (any, error) { return one(d.GetDecoderUtilization()) }, 12.0},
		{"jpeg", "nvmlDeviceGetJpgUtilization", 32, func(d *Device) (any, error) { return one(d.GetJpgUtilization()) }, 13.0},
		{"ofa", "nvmlDeviceGetOfaUtilization", 32, func(d *Device) (any, error) { return one(d.GetOfaUtilization()) }, 14.0},
		{"temperature", "nvmlDeviceGetTemperature", 32, func(d *Device) (any, error) { return one(d.GetTemperature()) }, 64.0},
		{"threshold", "nvmlDeviceGetTemperatureThreshold", 32, func(d *Device) (any, error) { return one(d.GetTemperatureThreshold(ThresholdSlowdown)) }, 89.0},
		{"memory temperature", "nvmlDeviceGetFieldValues", 32, func(d *Device) (any, error) { return one(d.GetMemoryTemperature()) }, 38.0},
		{"power", "nvmlDeviceGetPowerUsage", 32, func(d *Device) (any, error) { return one(d.GetPowerUsage()) }, 543.21},
		{"power limit", "nvmlDeviceGetEnforcedPowerLimit", 32, func(d *Device) (any, error) { return one(d.GetEnforcedPowerLimit()) }, 700.0},
		{"power limits", "nvmlDeviceGetPowerManagementLimitConstraints", 32, func(d *Device) (any, error) { return pairOf(d.GetPowerManagementLimitConstraints()) }, pair{200.0, 700.0}},
		{"energy", "nvmlDeviceGetTotalEnergyConsumption", 64, func(d *Device) (any, error) { return one(d.GetTotalEnergyConsumption()) }, 3600.5},
		{"clock", "nvmlDeviceGetClockInfo", 32, func(d *Device) (any, error) { return one(d.GetClockInfo(ClockMemory)) }, 3201_000_000},
		{"clock max", "nvmlDeviceGetMaxClockInfo", 32, func(d *Device) (any, error) { return one(d.GetMaxClockInfo(ClockSM)) }, 1980_000_000},
		{"pstate", "nvmlDeviceGetPerformanceState", 32, func(d *Device) (any, error) { return one(d.GetPerformanceState()) }, 0},
		{"throttle", "nvmlDeviceGetCurrentClocksEventReasons", 64, func(d *Device) (any, error) { return one(d.GetCurrentClocksEventReasons()) }, uint64(4)},
		{"violation", "nvmlDeviceGetViolationStatus", 64, func(d *Device) (any, error) { return one(d.GetViolationStatus(0)) }, 1.5},
		{"ecc", "nvmlDeviceGetTotalEccErrors", 64, func(d *Device) (any, error) { return one(d.GetTotalEccErrors(true, false)) }, uint64(2)},
		{"ecc aggregate", "nvmlDeviceGetTotalEccErrors", 64, func(d *Device) (any, error) { return one(d.GetTotalEccErrors(false, true)) }, uint64(3)},
		{"retired", "nvmlDeviceGetRetiredPages", 32, func(d *Device) (any, error) { return one(d.GetRetiredPages(true)) }, uint64(6)},
		{"retired pending", "nvmlDeviceGetRetiredPagesPendingStatus", 32, func(d *Device) (any, error) { return one(d.GetRetiredPagesPendingStatus()) }, true},
		{"remapped", "nvmlDeviceGetRemappedRows", 32, func(d *Device) (any, error) { return one(d.GetRemappedRows()) }, RemappedRows{7, 8, true, false}},
		{"fans", "nvmlDeviceGetNumFans", 32, func(d *Device) (any, error) { return one(d.GetNumFans()) }, 2},
		{"fan speed", "nvmlDeviceGetFanSpeed_v2", 32, func(d *Device) (any, error) { return one(d.GetFanSpeed(1)) }, 35.0},
		{"pcie link", "nvmlDeviceGetCurrPcieLinkGeneration", 32, func(d *Device) (any, error) { return pairOf(d.GetPcieLink()) }, pair{4, 8}},
		{"pcie link width", "nvmlDeviceGetCurrPcieLinkWidth", 32, func(d *Device) (any, error) { return pairOf(d.GetPcieLink()) }, pair{4, 8}},
		{"pcie link max", "nvmlDeviceGetMaxPcieLinkWidth", 32, func(d *Device) (any, error) { return pairOf(d.GetMaxPcieLink()) }, pair{5, 16}},
		{"replays", "nvmlDeviceGetPcieReplayCounter", 32, func(d *Device) (any, error) { return one(d.GetPcieReplayCounter()) }, uint64(9)},
		{"throughput", "nvmlDeviceGetPcieThroughput", 32, func(d *Device) (any, error) { return one(d.GetPcieThroughput(true)) }, 2048000.0},
		{"encoder sessions", "nvmlDeviceGetEncoderStats", 32, func(d *Device) (any, error) { return one(d.GetEncoderSessions()) }, 3},
		{"nvlink", "nvmlDeviceGetNvLinkState", 32, func(d *Device) (any, error) { return one(d.GetNvLinkState(0)) }, true},
		{"nvlink errors", "nvmlDeviceGetNvLinkErrorCounter", 64, func(d *Device) (any, error) { return one(d.GetNvLinkErrorCounter(0, NvLinkCRCFlit)) }, uint64(3)},
		{"mig mode", "nvmlDeviceGetMigMode", 32, func(d *Device) (any, error) { return one(d.MIGModeEnabled()) }, false},
		{"mig count", "nvmlDeviceGetMaxMigDeviceCount", 32, func(d *Device) (any, error) { return one(d.GetMaxMigDeviceCount()) }, 7},
		{"gpm support", "nvmlGpmQueryDeviceSupport", 32, func(d *Device) (any, error) { return one(d.GPMSupported()) }, true},
	}
}
