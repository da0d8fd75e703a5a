//go:build !embedworker

package worker

// embedded is empty in a plain `go build`: the worker is then looked for beside the exporter and on PATH.
var embedded []byte
