package worker

import (
	"log/slog"
	"path/filepath"
	"time"
)

// Config says which worker to run and when to lose patience with it. Zero values take the defaults named.
type Config struct {
	// Path is the worker program on disk. Empty: the embedded one, else nvml-worker beside the exporter, else on PATH.
	Path string
	// DriverRoot is the root directory below which the driver's libraries and devices are; the worker is chrooted to it. Empty: "/".
	DriverRoot string
	// Library is the NVML library, below DriverRoot. Empty: the worker searches.
	Library string
	// Interval is the period of the cheap readings. Zero: the worker's own default, 1 s.
	Interval time.Duration
	// Args are further flags for the worker, such as "--samples=5s".
	Args []string
	// Env is added to the worker's environment, which is otherwise empty but for LD_LIBRARY_PATH.
	Env []string

	StartTimeout time.Duration // no frame at all this long after the start: hung; 2 min, for nvmlInit wakes every GPU
	HangAfter    time.Duration // no frame for this long: hung; 10 s, or 5 intervals if that is more
	AllHungAfter time.Duration // every device reported as hung for this long: hung; 1 min
	KillGrace    time.Duration // not gone this long after SIGKILL: left behind; 5 s
	StopGrace    time.Duration // not gone this long after its standard input ended: SIGKILL; 2 s
	BackoffMin   time.Duration // pause before the first restart; 1 s. It doubles with each.
	BackoffMax   time.Duration // longest pause; 1 min
	Healthy      time.Duration // after this long in order the pause starts over at BackoffMin; 1 min
	MaxLine      int           // bytes of one line; 4 MiB
	MaxGarbage   int           // lines in succession that are no frames before the worker is replaced; 20
	MaxStuck     int           // workers left behind before no more are started until one has ended; 3
	MemoryLimit  int64         // bytes of resident memory at which the worker is replaced; 512 MiB. Negative: none

	// TempDirs are tried in order where a memfd may not be executed; default $TMPDIR, /tmp, /dev/shm, /run, /var/tmp.
	TempDirs []string
	// Logger gets one line per change of state. Nil: slog.Default.
	Logger *slog.Logger

	noMemfd   bool                 // for tests: as with vm.memfd_noexec=2
	embedded  []byte               // for tests: instead of the one built in
	kill      func(p *process)     // for tests: a SIGKILL that does nothing
	onStarted func(carrier string) // for tests: which way the program was executed
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&c.StartTimeout, 2 * time.Minute}, {&c.HangAfter, max(10*time.Second, 5*c.Interval)}, {&c.AllHungAfter, time.Minute},
		{&c.KillGrace, 5 * time.Second}, {&c.StopGrace, 2 * time.Second}, {&c.BackoffMin, time.Second}, {&c.BackoffMax, time.Minute},
		{&c.Healthy, time.Minute},
	} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	for _, d := range []struct {
		v   *int
		def int
	}{{&c.MaxLine, 4 << 20}, {&c.MaxGarbage, 20}, {&c.MaxStuck, 3}} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	if c.MemoryLimit == 0 {
		c.MemoryLimit = 512 << 20
	}
	if c.DriverRoot == "" {
		c.DriverRoot = "/"
	}
	// The thread that starts workers may have left the working directory.
	for _, path := range []*string{&c.DriverRoot, &c.Path} {
		if abs, err := filepath.Abs(*path); err == nil && *path != "" {
			*path = abs
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.embedded == nil {
		c.embedded = embedded
	}
	if c.kill == nil {
		c.kill = func(p *process) { p.proc.Kill() }
	}
	return c
}
