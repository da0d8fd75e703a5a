//go:build embedworker

package worker

import _ "embed"

// embedded is the worker program for this platform, compressed with gzip, as `make build` leaves it here.
//
//go:embed embedded/nvml-worker.gz
var embedded []byte
