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

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/table"
	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
)

func whyCommand(app *kingpin.Application) command {
	c := app.Command("why", "Say what holds a container back, from the last ten minutes of a running exporter. Exit code 0: nothing; from 10: by the first finding; 2: it cannot be told.")
	name := c.Arg("container", "Name, id or the beginning of an id of a container, or a PID on the host.").Required().String()
	from := addSourceFlags(c, "")
	asJSON := c.Flag("json", "The findings as JSON, as /api/v1/why has them.").Bool()
	return command{"why", func(cfg exporter.Config) error {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		r, err := explain(ctx, *name, from, cfg)
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

// explain asks the running exporter, or the recording.
func explain(ctx context.Context, name string, from *sourceFlags, cfg exporter.Config) (*why.Report, error) {
	remote, err := from.remote(cfg)
	if err != nil {
		return nil, err
	}
	var scene *why.Scene
	if remote == nil {
		s, h := recorded(cfg)
		scene = why.New(view.New(s), view.Others(s), h.Past())
	}
	ask := func(name string) (*why.Report, error) {
		if scene != nil {
			return scene.Ask(name)
		}
		r := &why.Report{}
		err := remote.get(ctx, "api/v1/why?container="+url.QueryEscape(name), r)
		var refused refusal
		if errors.As(err, &refused) && refused.code == http.StatusBadRequest {
			err = unknownError{errors.New(refused.reason)}
		}
		return r, err
	}
	r, err := ask(name)
	if err == nil {
		return r, nil
	}
	// A process of a container that is not on the GPU is known by its control group alone, on the exporter's own host.
	for _, id := range containersOf(cfg.ProcRoot, name) {
		if r, err := ask(id); err == nil {
			return r, nil
		}
	}
	var unknown unknownError
	if scene != nil || errors.As(err, &unknown) {
		err = fmt.Errorf("%s: %w; gpu-exporter ps shows who is on a GPU", containers.Clean(name, 100), err)
	}
	var silent *net.OpError
	if errors.As(err, &silent) {
		err = fmt.Errorf("%w; why needs one that has run for some minutes", err)
	}
	return nil, unseenError{err}
}

// unknownError is an exporter's word that it does not know the name.
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
