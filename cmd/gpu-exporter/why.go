package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/table"
	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
)

func whyCommand(app *kingpin.Application) command {
	c := app.Command("why", "Say what holds a container back, from the last ten minutes of a running exporter or from a look at this host. Exit code 0: nothing; from 10: by the first finding; 2: it cannot be told.")
	name := c.Arg("container", "Name, id or the beginning of an id of a container, or a PID on the host.").Required().String()
	from := addSourceFlags(c, " When none answers at the default, this host is watched for a while.")
	length := c.Flag("for", "For how long this host is watched where no exporter runs. Idleness shows after a minute.").Default("40s").Duration()
	asJSON := c.Flag("json", "The findings as JSON, as /api/v1/why has them.").Bool()
	return command{"why", func(cfg exporter.Config) error {
		if err := within("for", *length, time.Second, history.Steps*history.StepLength); err != nil {
			return usageError{err}
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		r, err := explain(ctx, *name, from, cfg, *length)
		if err != nil {
			return err
		}
		out := bufio.NewWriter(os.Stdout)
		if *asJSON {
			err = printJSON(out, r)
		} else {
			printReport(out, r)
		}
		if err := errors.Join(err, out.Flush()); err != nil {
			return err
		}
		if code := r.ExitCode(); code != 0 {
			return exitCode(code)
		}
		return nil
	}}
}

// explain asks the recording, the running exporter, or this host after it has been watched for some time.
func explain(ctx context.Context, name string, from *sourceFlags, cfg exporter.Config, length time.Duration) (*why.Report, error) {
	if cfg.Replay != nil {
		if _, err := from.remote(cfg); err != nil {
			return nil, err
		}
		s, past := busiest(cfg)
		return answer(asker(s, past), name, cfg.ProcRoot)
	}
	src, err := from.open(ctx, cfg)
	var silent *net.OpError
	switch {
	case errors.As(err, &silent):
		return nil, unseenError{fmt.Errorf("%w; why needs one that has run for some minutes", err)}
	case err != nil:
		return nil, err
	case src.local != nil:
		return watch(ctx, src, name, cfg.ProcRoot, length)
	}
	return answer(func(name string) (*why.Report, error) {
		r := &why.Report{}
		err := src.remote.get(ctx, "api/v1/why?container="+url.QueryEscape(name), r)
		var refused refusal
		if errors.As(err, &refused) && refused.code == http.StatusBadRequest {
			err = unknownError{errors.New(refused.reason)}
		}
		return r, err
	}, name, cfg.ProcRoot)
}

// watch looks at this host for a while, unless what is asked about is on no GPU: that shows at once.
func watch(ctx context.Context, src *source, name, proc string, length time.Duration) (*why.Report, error) {
	if err := src.settled(ctx); err != nil {
		return nil, err
	}
	h := history.New()
	var last *snapshot.Snapshot
	look := func() (*why.Report, error) {
		if now := src.local.Latest(); now != last {
			last = now
			h.Add(view.New(now))
		}
		return answer(asker(last, h.Past()), name, proc)
	}
	r, err := look()
	if err != nil || len(r.Uses) == 0 {
		return r, err
	}
	fmt.Fprintf(os.Stderr, "gpu-exporter: no exporter answers at %s, so this host is watched for %s; one that runs knows the last ten minutes\n", defaultURL, length)
	for end := time.Now().Add(length); time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return nil, unseenError{errors.New("interrupted before all was seen")}
		case <-time.After(500 * time.Millisecond):
		}
		if r, err = look(); err != nil {
			return nil, err // it has ended
		}
	}
	return r, nil
}

// asker returns what asks a host at one moment, with its past.
func asker(s *snapshot.Snapshot, past *history.Past) func(name string) (*why.Report, error) {
	scene := why.New(view.New(s), view.Others(s), past)
	return func(name string) (*why.Report, error) {
		r, err := scene.Ask(name)
		if err != nil {
			err = unknownError{err}
		}
		return r, err
	}
}

// answer asks about a name. A process of a container that is not on the GPU is known by its control group alone, on the exporter's own host.
func answer(ask func(name string) (*why.Report, error), name, proc string) (*why.Report, error) {
	r, err := ask(name)
	if err == nil {
		return r, nil
	}
	for _, id := range containersOf(proc, name) {
		if r, err := ask(id); err == nil {
			return r, nil
		}
	}
	var unknown unknownError
	if errors.As(err, &unknown) {
		err = fmt.Errorf("%s: %w; gpu-exporter ps shows who is on a GPU", containers.Clean(name, 100), err)
	}
	return nil, unseenError{err}
}

// unknownError says that a name is not known, or not of one alone.
type unknownError struct{ error }

// containersOf returns the ids in the control group of a process, the outermost first; nil where the name is no process here.
func containersOf(proc, name string) []string {
	pid, err := strconv.ParseUint(name, 10, 31)
	if err != nil {
		return nil
	}
	text, _ := os.ReadFile(fmt.Sprintf("%s/%d/cgroup", proc, pid)) // gone, or none of ours
	return containers.IDs(string(text))
}

// printReport writes the findings for people. What an exporter says cannot act on the terminal.
func printReport(w io.Writer, r *why.Report) {
	line := func(format string, a ...any) { fmt.Fprintln(w, containers.Clean(fmt.Sprintf(format, a...), 2000)) }
	head := []string{r.Party.String()}
	if r.Party.Image != "" {
		head = append(head, "image "+r.Party.Image)
	}
	for _, u := range r.Uses {
		text := fmt.Sprintf("GPU %d", u.GPU)
		if u.SM.OK {
			text += fmt.Sprintf(": SM time %.0f %%", u.SM.V)
		}
		if u.CPU.OK {
			text += fmt.Sprintf(", %.1f CPUs", u.CPU.V)
		}
		head = append(head, text+", "+table.Size(u.Memory))
	}
	if r.Seconds > 0 {
		head = append(head, fmt.Sprintf("looked at for %.0f s", r.Seconds))
	}
	line("%s", strings.Join(head, "; "))
	if len(r.Findings) == 0 {
		line("Nothing holds it back, as far as is known.")
	}
	for i, f := range r.Findings {
		line("%d. %s", i+1, f.Text)
		line("   %s", strings.TrimSuffix(f.Cause+": "+strings.Join(f.Evidence, "; "), ": "))
		line("   do: %s", f.Advice)
	}
	for _, b := range r.Blind {
		line("not known: %s", b)
	}
}
