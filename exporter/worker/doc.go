// Package worker runs nvml-worker, the only program here that loads NVIDIA's library, and passes its frames on.
//
// The worker can do everything wrong: crash in the library, hang in the driver, print garbage, grow without bound, never start. None of
// that reaches the exporter: each ends the worker, is counted by reason, and a fresh one is started after a pause. A worker that not
// even SIGKILL ends, because its system call never returns, is left behind and counted too.
//
// The package belongs to the static main program: it imports neither the binding nor purego. The program that it runs is the one named by
// Config.Path, or the one embedded at build time (build tag embedworker), or the one found beside the exporter or on PATH.
// It is executed by file descriptor, from a memfd where that is allowed, so that neither a writable file system nor a file under the driver
// root is needed.
package worker
