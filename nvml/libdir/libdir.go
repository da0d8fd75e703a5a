// Package libdir says where distributions put the driver's libraries. It is a leaf, so that the static main program can look there too.
package libdir

import "runtime"

// Directories returns the directories in the order in which they are searched, after the loader's own search path.
func Directories() []string {
	triple := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return []string{
		"/usr/lib/" + triple,                     // Debian, Ubuntu
		"/usr/lib/" + triple + "/nvidia/current", // Debian's alternatives
		"/usr/lib64",                             // RHEL, SUSE
		"/usr/lib64/nvidia",                      // RHEL with third-party packages
		"/usr/lib",                               // Arch
		"/usr/lib/nvidia",                        //
		"/run/opengl-driver/lib",                 // NixOS
		"/usr/lib/wsl/lib",                       // WSL
		"/run/nvidia/driver/usr/lib/" + triple,   // driver container
		"/run/nvidia/driver/usr/lib64",           // driver container
		"/usr/local/nvidia/lib64",                // GKE, containers
		"/usr/local/nvidia/lib",                  //
		"/usr/local/nvidia/lib/" + triple,        //
		"/home/kubernetes/bin/nvidia/lib64",      // GKE's Container-Optimized OS
	}
}
