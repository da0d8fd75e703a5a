// Package tracefs lets tracepoints be attached where nobody has mounted tracefs.
package tracefs

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Root is where tracefs is, or is mounted for the function given to Do.
const Root = "/sys/kernel/tracing"

// Do runs f where tracefs is mounted. Where it is not, it is mounted for the one thread that runs f and ends with it: the host sees nothing.
// f must not hand its work to other goroutines.
func Do(f func() error) error {
	if _, err := os.Stat(Root + "/events"); err == nil {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its mount namespace
		if err := mount(); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func mount() error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mounting tracefs: %w", err)
	}
	err := errors.Join(unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("tracefs", Root, "tracefs", 0, ""))
	if err != nil {
		return fmt.Errorf("mounting tracefs: %w", err)
	}
	return nil
}
