//go:build race

package nvml

// The race detector makes sync.Pool forget on purpose, so allocations cannot be counted under it.
const raceDetector = true
