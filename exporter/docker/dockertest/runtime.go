package dockertest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// capabilities are the kernel's, by number.
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
	NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
	SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
	WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

// runtime returns the OCI runtime to use: runc, or where the test itself lacks capabilities, as in many CI machines, a wrapper of
// the same name that leaves those out, since a --privileged container could not be started otherwise.
func (d *Daemon) runtime() (string, error) {
	runc := d.programs["runc"]
	missing, err := missingCapabilities()
	if err != nil || len(missing) == 0 {
		return runc, err
	}
	var edits []string
	for _, name := range missing {
		edits = append(edits, fmt.Sprintf(`-e 's/"CAP_%s",//g' -e 's/,"CAP_%s"//g'`, name, name))
	}
	script := fmt.Sprintf(`#!/bin/sh
previous=
for argument; do
	case $previous in
	--bundle) sed -i %[1]s "$argument/config.json" ;;
	--process) sed -i %[1]s "$argument" ;;
	esac
	previous=$argument
done
exec %[2]s "$@"
`, strings.Join(edits, " "), runc)
	path := filepath.Join(d.Dir, "bin", "runc") // first on the daemon's PATH
	return path, os.WriteFile(path, []byte(script), 0o755)
}

// missingCapabilities returns the capabilities that this process cannot hand on: those outside its bounding set.
func missingCapabilities() ([]string, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, err
	}
	last := len(capabilities) - 1
	if data, err := os.ReadFile("/proc/sys/kernel/cap_last_cap"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
			last = min(last, n)
		}
	}
	var missing []string
	for line := range strings.Lines(string(status)) {
		if hex, ok := strings.CutPrefix(line, "CapBnd:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			if err != nil {
				return nil, fmt.Errorf("reading the bounding set: %w", err)
			}
			for i := 0; i <= last; i++ {
				if set&(1<<i) == 0 {
					missing = append(missing, capabilities[i])
				}
			}
		}
	}
	return missing, nil
}
