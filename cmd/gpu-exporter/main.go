// Gpu-exporter tells Prometheus which container is on which GPU, how hard it works there and what it holds.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/collectors/version"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/promslog"
	promslogflag "github.com/prometheus/common/promslog/flag"
	versioninfo "github.com/prometheus/common/version"
	"github.com/prometheus/exporter-toolkit/web"
	"github.com/prometheus/exporter-toolkit/web/kingpinflag"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/page"
	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/worker"
	"gpu-exporter/tracer"
)

func main() {
	frugal()
	err := run(os.Args[1:], parseArgs)
	var exit exitCode
	if errors.As(err, &exit) {
		os.Exit(int(exit))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "gpu-exporter: %v\n", oneLine(err))
		var usage usageError
		var unseen unseenError
		if errors.As(err, &usage) || errors.As(err, &unseen) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

// frugal keeps the program small beside what it measures: a heap of a few megabytes, and no idle threads that look for work at each tick. One
// processor of Go's scheduler is enough, for nothing here takes longer than some milliseconds, and takes less CPU time than two: nobody wakes a
// second thread for each event.
func frugal() {
	runtime.MemProfileRate = 0 // nothing shows the profile
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	// For all threads, those to come and the worker's: Go's monitor thread sleeps 20 microseconds at a time while anything runs, which with the
	// kernel's usual slack of 50 took a third of the CPU time. Nobody waits for a timer here to the millisecond.
	syscall.AllThreadsSyscall(syscall.SYS_PRCTL, syscall.PR_SET_TIMERSLACK, uintptr(time.Millisecond), 0)
}

// usageError is a wrong flag or an unreadable configuration.
type usageError struct{ error }

// exitCode ends the program with a code that is an answer, not a failure: nothing is printed.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// run does what the arguments say once take, which is parseArgs but in a test, has taken them apart.
func run(args []string, take func(app *kingpin.Application, args []string) (chosen string, err error)) error {
	app := kingpin.New("gpu-exporter", "docker stats for GPUs: which container is on which GPU, how hard, and what it holds.")
	app.HelpFlag.Short('h').Help("Show help; after a command, that of the command.")
	app.UsageWriter(os.Stdout).UsageTemplate(usage).UsageFuncs(usageFuncs).Version(versionText())
	app.VersionFlag.Help("Show the version.")
	// The flags of the application say what is watched; each command has its own besides. Without a command it serves.
	serving := app.Command("serve", "Serve the metrics and the page: what is done without a command.").Default()
	commands := []command{psCommand(app), topCommand(app), whyCommand(app), doctorCommand(app), traceCommand(app)}
	commands = append(append(commands, assetsCommands(app)...), installCommands(app)...)
	var (
		path     = serving.Flag("web.telemetry-path", "Path of the metrics.").Default("/metrics").String()
		interval = app.Flag("nvml.interval", "Period of the cheap NVML readings.").Default("1s").Duration()
		fastGPM  = app.Flag("nvml.gpm-fast", "Period of additional short readings of SM activity on Hopper and later, such as 100ms, each 0.3 ms of CPU time; 0: none.").Default("0s").Duration()
		program  = app.Flag("nvml.worker", "Worker program on disk, instead of the one built in.").PlaceHolder("FILE").String()
		library  = app.Flag("nvml.library", "NVML library below the driver root; searched when empty.").PlaceHolder("FILE").String()
		root     = app.Flag("driver-root", "Directory below which the driver's libraries and devices are.").Default("/").String()
		engine   = app.Flag("docker.host", "Address of the Docker engine.").Default(docker.DefaultHost).String()
		proc     = app.Flag("proc", "A procfs of the host's PID namespace.").Default("/proc").String()
		hostIP   = app.Flag("host-ip", "Value of the label host_ip; the address of the default route when empty.").PlaceHolder("ADDRESS").String()
		mode     = app.Flag("tracer", "How kernel events are traced: fentry, tracepoint or off; auto takes fentry, else tracepoint, else off.").Default(tracer.ModeAuto).
				Enum(tracer.ModeAuto, tracer.ModeFentry, tracer.ModeTracepoint, tracer.ModeOff)
		probe     = app.Flag("probe", "Count copies and allocations with probes on libcuda: on or off.").Default("on").Enum("on", "off")
		launches  = app.Flag("probe.launches", "Count kernel launches too, about a microsecond each.").Bool()
		traced    = app.Flag("tracer.devices", "Character devices to trace instead of NVIDIA's, as MAJOR:MINOR=NODE: for tests.").Hidden().Strings()
		window    = app.Flag("window", "Window of the maxima.").Default("60s").Duration()
		linger    = app.Flag("linger", "For how long the counters of a gone process stay.").Default("2m").Duration()
		include   = serving.Flag("metrics.include", "Regular expression of the metric families to expose.").PlaceHolder("REGEXP").String()
		exclude   = serving.Flag("metrics.exclude", "Regular expression of the metric families to leave out.").PlaceHolder("REGEXP").String()
		perPID    = serving.Flag("metrics.processes", "A series per process: true, or false: processes are summed into their containers.").Default("true").Enum("true", "false")
		valueLbls = serving.Flag("metrics.value-labels", "Add temperature, power, memory used and memory total as labels to gpu_utilization_percent. "+
			"Every change of one makes a new series: thousands per process and day. Off unless something depends on it.").Bool()
		maxSeries = serving.Flag("metrics.max-series", "Most series of a scrape. Where it bites, processes are summed into their containers, and if that is not enough containers into their GPU, until the restart. 0: no bound.").Default("100000").Uint32()
		record    = serving.Flag("record", "File to record every input in, for --replay.").PlaceHolder("FILE").String()
		replay    = app.Flag("replay", "Recording to show instead of this host: a file, or demo for the built-in one.").PlaceHolder("FILE").String()
		logConfig = &promslog.Config{}
	)
	toolkit := kingpinflag.AddFlags(serving, ":9400")
	promslogflag.AddFlags(app, logConfig)
	chosen, err := take(app, args)
	if err != nil {
		return usageError{err}
	}
	logger := promslog.New(logConfig)

	options := metrics.Options{Fold: *perPID == "false", ValueLabels: *valueLbls, MaxSeries: int(*maxSeries)}
	if *valueLbls {
		logger.Warn("--metrics.value-labels makes a new series of gpu_utilization_percent with every change of temperature, power or memory")
	}
	for _, f := range []struct {
		text string
		to   **regexp.Regexp
		flag string
	}{{*include, &options.Include, "--metrics.include"}, {*exclude, &options.Exclude, "--metrics.exclude"}} {
		if f.text == "" {
			continue
		}
		re, err := regexp.Compile("^(?:" + f.text + ")$")
		if err != nil {
			return usageError{fmt.Errorf("%s: %w", f.flag, err)}
		}
		*f.to = re
	}
	if err := docker.CheckHost(*engine); err != nil {
		return usageError{fmt.Errorf("--docker.host: %w", err)}
	}
	const shortest = 10 * time.Millisecond // the worker takes no shorter period
	fastest := shortest
	if *fastGPM == 0 {
		fastest = 0
	}
	for _, err := range []error{within("nvml.interval", *interval, shortest, time.Hour), within("nvml.gpm-fast", *fastGPM, fastest, time.Hour),
		within("window", *window, time.Second, time.Hour), within("linger", *linger, 0, 24*time.Hour), checkHostIP(*hostIP)} {
		if err != nil {
			return usageError{err}
		}
	}
	if err := web.Validate(*toolkit.WebConfigFile); err != nil {
		return usageError{fmt.Errorf("--web.config.file: %w", err)}
	}
	cfg := exporter.Config{
		Worker:   worker.Config{Path: *program, Library: *library, Interval: *interval, Logger: logger},
		Docker:   docker.Config{Host: *engine, ProcRoot: *proc, Logger: logger},
		ProcRoot: *proc, HostIP: *hostIP, Record: *record, Logger: logger,
		Snapshot: snapshot.Config{Interval: *interval, Window: *window, Linger: *linger},
	}
	if *fastGPM > 0 {
		cfg.Worker.Args = []string{"--gpm-fast=" + fastGPM.String()}
	}
	devices, err := tracedDevices(*traced)
	if err != nil {
		return usageError{fmt.Errorf("--tracer.devices: %w", err)}
	}
	cfg.Tracer = tracer.Config{Mode: *mode, ProcRoot: *proc, CgroupRoot: cgroupRoot(*proc), Devices: devices, Window: *window, Linger: *linger,
		Probe: *probe == "on", Launches: *launches, Logger: logger}
	if *root != "/" {
		cfg.Worker.DriverRoot = *root
	}
	if cfg.HostIP == "" {
		cfg.HostIP = defaultAddress()
	}
	if *replay != "" {
		list, err := open(*replay)
		if err != nil {
			return usageError{fmt.Errorf("--replay: %w", err)}
		}
		cfg.Replay = list
	}
	for _, c := range commands {
		if c.name == chosen {
			return c.run(cfg)
		}
	}
	if err := errors.Join(checkPath(*path), checkListen(*toolkit.WebListenAddresses)); err != nil {
		return usageError{err}
	}
	if *replay != "" {
		logger.Info("serving a recording, not this host", "recording", *replay)
	}
	return serve(cfg, options, *path, toolkit, logger)
}

// command is what the program does besides serving.
type command struct {
	name string
	run  func(exporter.Config) error
}

// cgroupRoot is the host's hierarchy of control groups: in a container, its own is only a part of it.
func cgroupRoot(proc string) string {
	host := proc + "/1/root/sys/fs/cgroup"
	if _, err := os.Stat(host); err != nil {
		return "/sys/fs/cgroup"
	}
	return host
}

// open reads a recording, the built-in one by the name demo.
func open(name string) ([]input.Input, error) {
	if name == "demo" {
		return recording.Read(bytes.NewReader(recording.Demo))
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return recording.Read(bytes.NewReader(b))
}

// staleAfter is the age at which a snapshot says that sampling has stopped.
const staleAfter = 5 * time.Second

func serve(cfg exporter.Config, options metrics.Options, path string, toolkit *web.FlagConfig, logger *slog.Logger) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := confine(needed(cfg, *toolkit.WebListenAddresses)); err != nil {
		logger.Warn("running with more privileges than needed", "err", err)
	}
	if err := checkRecord(cfg.Record); err != nil {
		return usageError{err}
	}
	e := exporter.New(cfg)

	own := newSelf(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), version.NewCollector("gpu_exporter"))
	go own.run(ctx)
	options.More = own.families

	mux := http.NewServeMux()
	// Not compressed: a gzip writer is 0.8 MB that every other scrape would make anew, and half of its time, to save 30 kB.
	mux.Handle(path, metrics.Handler(metrics.New(e.Latest, func(s *snapshot.Snapshot) float64 { return time.Since(s.Time).Seconds() }, options),
		promhttp.HandlerOpts{ErrorLog: scrapeLog{logger}, ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 16, EnableOpenMetrics: true,
			DisableCompression: true}))
	people := page.New(e.Latest)
	people.Register(mux)
	mux.HandleFunc("/-/healthy", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	mux.HandleFunc("/-/ready", func(w http.ResponseWriter, _ *http.Request) { ready(w, e.Latest()) })
	if cfg.Replay == nil {
		registerRelease(mux, e, *toolkit.WebConfigFile, logger)
	}
	if path != "/" {
		if err := people.RegisterPage(mux, path, versioninfo.Version); err != nil {
			return err
		}
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10, ConnState: (&connections{most: maxConnections, of: map[string][]net.Conn{}}).state}

	failed := make(chan error, 2)
	done := make(chan struct{})
	listening := make(chan struct{})
	var once sync.Once
	server.BaseContext = func(net.Listener) context.Context {
		once.Do(func() { close(listening) })
		return context.Background()
	}
	go people.Run(ctx)
	go func() {
		defer close(done)
		select { // nothing is attached or overwritten by an exporter that cannot listen
		case <-listening:
		case <-ctx.Done():
			return
		}
		if err := e.Run(ctx); err != nil {
			failed <- err
		}
	}()
	go func() {
		if err := web.ListenAndServe(server, toolkit, logger); !errors.Is(err, http.ErrServerClosed) {
			flag := "web.listen-address"
			if *toolkit.WebSystemdSocket {
				flag = "web.systemd-socket"
			}
			failed <- fmt.Errorf("--%s: %w", flag, err)
		}
	}()
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; --web.listen-address=:9401 takes another port", err)
		}
		stop()
	}
	closing, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	server.Shutdown(closing)
	<-done
	return err
}

// scrapeLog logs what went wrong in a scrape. That the scraper went away is not worth a line, let alone the line per family that promhttp makes of it.
type scrapeLog struct{ *slog.Logger }

// Println implements promhttp.Logger.
func (l scrapeLog) Println(v ...any) {
	level := slog.LevelError
	for _, x := range v {
		var gone net.Error
		if err, ok := x.(error); ok && errors.As(err, &gone) {
			level = slog.LevelDebug
		}
	}
	l.Log(context.Background(), level, "scrape: "+strings.TrimSpace(fmt.Sprintln(v...)))
}

// ready answers 200 while the snapshot is fresh. Which sources it lacks is said in the body: they are states, not faults of the exporter.
func ready(w http.ResponseWriter, s *snapshot.Snapshot) {
	if age := time.Since(s.Time); age > staleAfter {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintf(w, "not ready: the last snapshot is %.0f s old\n", age.Seconds())
	} else {
		fmt.Fprintln(w, "ready")
	}
	if s.Recorded {
		fmt.Fprintln(w, "this is a recording, not this host")
	}
	down := false
	for _, name := range []string{input.SourceNVML, input.SourceDocker} {
		switch src, ok := s.Sources[name]; {
		case !ok:
			fmt.Fprintf(w, "%s: starting\n", name)
		case src.Up:
			fmt.Fprintf(w, "%s: up\n", name)
		default:
			down = true
			fmt.Fprintf(w, "%s: down: %s\n", name, containers.Cut(src.Reason, maxReason))
		}
	}
	switch r := s.Tracer; {
	case s.TracerUp && r.Ledger:
		fmt.Fprintf(w, "tracer: up, with %s\n", r.Mode)
	case s.TracerUp:
		fmt.Fprintf(w, "tracer: up, with %s; no memory from kernel events: %s\n", r.Mode, r.LedgerReason)
	case r == nil && s.Recorded:
		fmt.Fprintln(w, "tracer: not in the recording")
	case r == nil:
		fmt.Fprintln(w, "tracer: starting")
	default:
		down = true
		fmt.Fprintf(w, "tracer: down: %s\n", containers.Cut(r.Reason, maxReason))
	}
	if down {
		fmt.Fprintln(w, "what to do: gpu-exporter doctor")
	}
}

// defaultAddress returns the address from which this host reaches others; no packet is sent. Empty when it has none.
func defaultAddress() string {
	// 192.0.2.1 is reserved for documentation: it is routed by the default route everywhere.
	c, err := net.Dial("udp", "192.0.2.1:9")
	if err != nil {
		return ""
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).IP.String()
}
