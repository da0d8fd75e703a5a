// Package abi reads the parameters of NVIDIA driver calls: pure functions from the bytes of one ioctl to a ledger event. The BPF program
// applies the same rules in the kernel; this package applies them to recordings and to what user space reads itself.
package abi

import (
	"fmt"
	"strconv"
	"strings"
)

// Version is a driver version such as 580.159.04. The zero value is "not known".
type Version struct{ Major, Minor, Patch int }

// The branches whose structures are known: the first that has any of them, and the last that was compared.
const (
	OldestBranch = 470
	NewestBranch = 595
)

// ParseVersion reads a driver version as /sys/module/nvidia/version or the version handshake has it: "580.159.04", "470.256".
func ParseVersion(text string) (Version, error) {
	text = strings.TrimRight(strings.TrimSpace(text), "\x00")
	parts := strings.Split(text, ".")
	if len(parts) < 2 || len(parts) > 3 {
		return Version{}, fmt.Errorf("reading driver version %.40q: not of the form 580.159.04", text)
	}
	var numbers [3]int
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 16)
		if err != nil {
			return Version{}, fmt.Errorf("reading driver version %.40q: not of the form 580.159.04", text)
		}
		numbers[i] = int(n)
	}
	if numbers[0] == 0 {
		return Version{}, fmt.Errorf("reading driver version %.40q: there is no branch 0", text)
	}
	return Version{numbers[0], numbers[1], numbers[2]}, nil
}

// Supported returns nil if the structures of this driver are known, else the reason why the ledger must stay off.
func (v Version) Supported() error {
	switch {
	case v == Version{}:
		return fmt.Errorf("driver version not known")
	case v.Major < OldestBranch:
		return fmt.Errorf("driver %s is older than the oldest known branch, %d", v, OldestBranch)
	case v.Major > NewestBranch:
		return fmt.Errorf("driver %s is newer than the newest known branch, %d", v, NewestBranch)
	}
	return nil
}

func (v Version) String() string { return fmt.Sprintf("%d.%02d.%02d", v.Major, v.Minor, v.Patch) }

// AllocStatus returns the offset of the status word in the three wire forms of RM_ALLOC, told apart by their size. It is false for
// a size that is none of them, and for a form that depends on the version while that is not known.
func (v Version) AllocStatus(size int) (offset int, ok bool) {
	switch size {
	case 48:
		return 40, true
	case 40:
		if v.Major < 525 {
			return 32, v.Major != 0
		}
		return 36, true
	case 32:
		if v.Major < 535 {
			return 24, v.Major != 0
		}
		return 28, true
	}
	return 0, false
}

// AllocFlags returns the offset of RM_ALLOC's flags, whose bit 0 says that the parameters are serialised; false where there are none.
func (v Version) AllocFlags(size int) (offset int, ok bool) {
	switch {
	case size == 48:
		return 36, true
	case size == 40 && v.Major >= 525:
		return 32, true
	}
	return 0, false
}
