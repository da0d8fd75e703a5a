package processes

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestOwn: what the kernel says by its calls too; nothing where there is no /proc.
func TestOwn(t *testing.T) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	o := ReadOwn("/proc")
	if o.Kernel != unix.ByteSliceToString(name.Release[:]) || len(o.BootID) != 36 || len(o.Capabilities) != 16 {
		t.Errorf("%+v", o)
	}
	if o := ReadOwn(t.TempDir()); o != (Own{}) {
		t.Errorf("%+v", o)
	}
}
