package nvml

import "math"

// What counts as absent. NVML and its drivers have no single way to say that a figure does not exist, and they have been seen to answer
// success with each of these. Whatever matches becomes ErrNoValue (or, within a list, a dropped entry), and so has no series:
//
//	unsigned 32 bits     2^32-1 and the fifteen values below it
//	unsigned 64 bits     2^62 and above: int64 max and its neighbours, 2^63, 2^64-1, the bits of a NaN
//	bytes                2^50 and above; used, free or reserved above the total; a total of 0
//	percent              above 100 (a fan: above 1000, as its speed is relative to a nominal one)
//	temperature          above 250 °C; 0 °C for the memory sensor, which is how boards without one answer
//	power, energy        above 100 kW; above 10^17 mJ
//	clock                above 100 GHz
//	throughput           above 1 TiB/s
//	double               NaN, infinite, negative; above 100.5 for a GPM percentage
//	switch               anything but 0 and 1
//	P-state              above 15: 32 is NVML's "unknown"
//	PCIe link            generation above 16, more than 64 lanes
//	counts of things     absurd: 1024 devices, 64 fans, 65536 sessions, 2^20 rows or pages, 65536 list entries
//	PID                  0, or above 2^31-1
//	time of a sample     0, above 2^62, or not after the time asked for; "in the future" is for the caller, who knows the time
//	any sample           a figure above 100 % drops the sample
//	text                 empty, or not ended within its buffer; bytes that are not printable ASCII are taken out
//
// Results are set to a sentinel before each call, so that a driver which succeeds without writing is found out too.

// valid32 refuses the 32-bit sentinel and its neighbours.
func valid32(v uint32) (uint32, error) {
	if v >= math.MaxUint32-15 {
		return 0, ErrNoValue
	}
	return v, nil
}

// validBytes refuses amounts of memory that no device has.
func validBytes(v uint64) (uint64, error) {
	if v >= 1<<50 {
		return 0, ErrNoValue
	}
	return v, nil
}

// validCount refuses the sentinels of 64-bit counters, and all that is too large for a counter from the start.
func validCount(v uint64) (uint64, error) {
	if v >= 1<<62 {
		return 0, ErrNoValue
	}
	return v, nil
}

// validTime refuses what cannot be a Unix time in microseconds, or is not after since.
func validTime(t uint64, since int64) bool {
	return t > 0 && t < 1<<62 && int64(t) > since
}

// validPID refuses what cannot be a process.
func validPID(pid uint32) bool { return pid > 0 && pid <= math.MaxInt32 }

// percent refuses what cannot be a percentage.
func percent(v uint32, err error) (float64, error) {
	if err == nil && v > 100 {
		return 0, ErrNoValue
	}
	return float64(v), err
}
