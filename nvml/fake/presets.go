package fake

import "fmt"

// GiB is 2^30 bytes.
const GiB = 1 << 30

// H200 is a device that answers as an idle NVIDIA H200 does. Its minor number is not its index, as on hosts where it matters.
func H200(index int) GPU {
	g := common(index, "NVIDIA H200")
	g.Set("architecture", 9)
	g.Set("cuda_capability", 9, 0)
	g.Set("memory", uint64(150754820096), 644939776, 0)
	g.Set("bar1", uint64(256*GiB), 2<<20)
	g.Set("power", 76500)
	g.Set("power_limit", 700000)
	g.Set("power_limits", 200000, 700000)
	g.Set("energy", 3_600_000_000, 76500)
	g.Set("clock", 345, 345, 3201, 765)
	g.Set("clock_max", 1980, 1980, 3201, 1545)
	g.Set("throttle", 1)
	g.Set("ecc", 0, 0, 0, 0)
	g.Set("remapped_rows", 0, 0, 0, 0)
	g.Set("pcie_generation", 5)
	g.Set("pcie_width", 16)
	g.Set("pcie_generation_max", 5)
	g.Set("pcie_width_max", 16)
	g.Set("pcie_throughput", 0, 0)
	g.Set("jpeg", 0)
	g.Set("ofa", 0)
	g.Set("mig_mode", 0)
	g.Fields = []Field{{ID: 82, Type: 1, Value: "38"}, {ID: 74, Type: 3, Value: "0"}, {ID: 76, Type: 3, Value: "0"}, {ID: 269, Type: 3, Value: "0"},
		{ID: 270, Type: 3, Value: "0"}, {ID: 271, Type: 3, Value: "0"}, {ID: 197, Type: 1, Value: "0"}, {ID: 198, Type: 1, Value: "0"}}
	g.GPM = map[int]float64{1: 0, 2: 0, 3: 0, 5: 0, 10: 0, 11: 0, 12: 0, 13: 0, 20: 0, 21: 0, 60: 0, 61: 0}
	return g
}

// A10 is a data-centre GPU without NVLink, GPM and MIG.
func A10(index int) GPU {
	g := common(index, "NVIDIA A10")
	g.Set("architecture", 7)
	g.Set("cuda_capability", 8, 6)
	g.Set("memory", uint64(24146608128), 340983808, 0)
	g.Set("bar1", uint64(32*GiB), 1<<20)
	g.Set("power", 21300)
	g.Set("power_limit", 150000)
	g.Set("power_limits", 100000, 150000)
	g.Set("energy", 120_000_000, 21300)
	g.Set("clock", 210, 210, 405, 555)
	g.Set("clock_max", 1695, 1695, 6251, 1530)
	g.Set("throttle", 1)
	g.Set("ecc", 0, 0, 0, 0)
	g.Set("remapped_rows", 0, 0, 0, 0)
	g.Set("pcie_generation", 1)
	g.Set("pcie_width", 16)
	g.Set("pcie_generation_max", 4)
	g.Set("pcie_width_max", 16)
	g.Set("pcie_throughput", 0, 0)
	return g
}

// Old is a desktop GPU of the Kepler generation: a fan, no ECC, no energy counter, no process samples.
func Old(index int) GPU {
	g := common(index, "GeForce GTX 680")
	g.Unset("serial", "event_types", "encoder_sessions")
	g.Set("cuda_capability", 3, 0)
	g.Set("memory", uint64(2*GiB), 0, 0)
	g.Set("fans", 1)
	g.Set("fan_speed", 30)
	g.Set("no_samples")
	g.Set("no_process_samples")
	return g
}

func common(index int, name string) GPU {
	var g GPU
	g.Set("uuid", fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", 0xc0ffee00+index, index))
	g.Set("name", name)
	g.Set("serial", fmt.Sprintf("16540230%05d", index))
	g.Set("vbios", "96.00.BC.00.01")
	g.Set("pci", fmt.Sprintf("%08x:%02x:00", index/16, 0x0a+index%16*8))
	g.Set("minor", 7-index%8+index/8*8)
	g.Set("persistence", 1)
	g.Set("compute_mode", 0)
	g.Set("temperature", 31)
	g.Set("temperature_threshold", 92, 89)
	g.Set("pstate", 0)
	g.Set("encoder", 0)
	g.Set("decoder", 0)
	g.Set("encoder_sessions", 0)
	g.Set("pcie_replays", 0)
	g.Set("event_types", 0x1|0x2|0x8)
	return g
}
