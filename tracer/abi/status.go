package abi

import "cmp"

// AtLeast tells whether v is the given version or a later one.
func (v Version) AtLeast(major, minor, patch int) bool {
	return cmp.Or(cmp.Compare(v.Major, major), cmp.Compare(v.Minor, minor), cmp.Compare(v.Patch, patch)) >= 0
}

// RMStatus returns the offset of the status word in the parameters of each RM call whose size does not matter, by call number.
func (v Version) RMStatus() map[uint32]int {
	offsets := map[uint32]int{
		0x27: 40, 0x28: 16, nrFree: 12, nrControl: 28, nrDup: 24, 0x35: 20, 0x41: 48, nrVidHeap: 20, 0x4e: 40, 0x4f: 24, 0x54: 48,
		0x57: 48, 0x58: 32, 0x5e: 32, 206: 12, 207: 12,
	}
	if v.AtLeast(550, 40, 7) {
		offsets[0x58] = 40
	}
	if v.AtLeast(580, 65, 6) {
		offsets[0x57] = 56
	}
	return offsets
}

// UVMStatus returns the offset of the status word in the parameters of each UVM call, by call number.
func (v Version) UVMStatus() map[uint32]int {
	offsets := map[uint32]int{
		25: 28, 26: 16, 27: 48, 28: 24, 33: 1196, 34: 16, 37: 36, 38: 16, 39: 4, 42: 32, 46: 32, 51: 72, 53: 24, 65: 32, 66: 32, 68: 1176,
		72: 16, 73: 16, 74: 32, 75: 4, 78: 52, 80: 24,
	}
	if v.AtLeast(550, 40, 7) {
		offsets[42] = 36
	}
	if v.AtLeast(550, 40, 53) {
		offsets[33], offsets[68] = 9260, 9240
	}
	if v.AtLeast(590, 44, 1) {
		offsets[34] = 8
		delete(offsets, 28) // shorter, and not known where
	}
	return offsets
}
