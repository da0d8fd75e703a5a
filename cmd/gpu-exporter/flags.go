package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/prometheus/common/promslog"
	promslogflag "github.com/prometheus/common/promslog/flag"
	versioninfo "github.com/prometheus/common/version"
)

// parseArgs takes the arguments apart. An error names the flag, and what is wrong with its value, which kingpin's own do not.
func parseArgs(app *kingpin.Application, args []string) (chosen string, err error) {
	if err := noValues(app.Model(), args); err != nil {
		return "", err
	}
	if len(args) > 1 && args[0] == "help" { // kingpin's own ends with another code where there is no such command
		args = append(slices.Clone(args[1:]), "--help")
	}
	chosen, failed := app.Parse(args)
	context, err := app.ParseContext(args)
	if err == nil {
		for _, element := range context.Elements {
			clause, ok := element.Clause.(*kingpin.FlagClause)
			if !ok {
				continue
			}
			flag := clause.Model()
			if failed != nil { // values are set anew, to find the one that fails
				if err := flag.Value.Set(*element.Value); err != nil {
					return "", valueError(flag, *element.Value, err)
				}
			} else if *element.Value == "" && len(flag.Default) > 0 && flag.Default[0] != "" {
				return "", fmt.Errorf("--%s must not be empty", flag.Name)
			}
		}
	}
	if failed == nil {
		return chosen, nil
	}
	text := failed.Error()
	if word, ok := strings.CutPrefix(text, "unexpected "); ok {
		text = fmt.Sprintf("unexpected argument %q", word)
	}
	help := "gpu-exporter --help"
	if context != nil && context.SelectedCommand != nil {
		help = "gpu-exporter " + context.SelectedCommand.FullCommand() + " --help"
	}
	return "", fmt.Errorf("%s; see %s", text, help)
}

// noValues refuses values of flags that take none: kingpin would take them for arguments.
func noValues(app *kingpin.ApplicationModel, args []string) error {
	takesNone := map[string]bool{}
	add := func(flags []*kingpin.FlagModel) {
		for _, f := range flags {
			takesNone[f.Name] = f.IsBoolFlag()
		}
	}
	add(app.Flags)
	for _, c := range app.FlattenedCommands() {
		add(c.Flags)
	}
	for _, arg := range args {
		if arg == "--" {
			break
		}
		name, _, ok := strings.Cut(arg, "=")
		name, long := strings.CutPrefix(name, "--")
		if ok && long && takesNone[strings.TrimPrefix(name, "no-")] {
			return fmt.Errorf("--%s takes no value: --%[1]s sets it, --no-%[1]s clears it", strings.TrimPrefix(name, "no-"))
		}
	}
	return nil
}

// valueError says what is wrong with the value of a flag, and what would be right.
func valueError(flag *kingpin.FlagModel, value string, err error) error {
	var options string
	switch flag.Name {
	case promslogflag.LevelFlagName:
		options = strings.Join(promslog.LevelFlagOptions, ",")
	case promslogflag.FormatFlagName:
		options = strings.Join(promslog.FormatFlagOptions, ",")
	default:
		if rest, ok := strings.CutPrefix(err.Error(), "enum value must be one of "); ok {
			options, _, _ = strings.Cut(rest, ", got ")
		}
	}
	if options != "" {
		return fmt.Errorf("--%s must be one of %s, not %q", flag.Name, strings.ReplaceAll(options, ",", ", "), value)
	}
	if g, ok := flag.Value.(kingpin.Getter); ok {
		switch g.Get().(type) {
		case time.Duration:
			return fmt.Errorf("--%s: %q is not a duration, such as 500ms, 60s or 2m", flag.Name, value)
		case uint32:
			return fmt.Errorf("--%s: %q is not a whole number from 0 on", flag.Name, value)
		}
	}
	return fmt.Errorf("--%s: %w", flag.Name, err)
}

// within tells whether the duration that a flag has is allowed.
func within(flag string, value, least, most time.Duration) error {
	if value < least || value > most {
		return fmt.Errorf("--%s must be from %s to %s, not %s", flag, least, most, value)
	}
	return nil
}

// checkListen tells what is wrong with addresses to listen at, as far as it can be told without listening.
func checkListen(addresses []string) error {
	for _, address := range addresses {
		rest, vsock := strings.CutPrefix(address, "vsock://")
		_, port, err := net.SplitHostPort(rest)
		if err != nil {
			return fmt.Errorf("--web.listen-address: %q is not of the form HOST:PORT or :PORT", address)
		}
		if vsock { // its ports have 32 bits and no names
			_, err = strconv.ParseUint(port, 10, 32)
		} else {
			_, err = net.LookupPort("tcp", port)
		}
		if err != nil || port == "" {
			return fmt.Errorf("--web.listen-address: %q has no port: a number up to 65535 after the colon", address)
		}
	}
	return nil
}

// checkRecord tells whether a recording can be written to a file; what is in it stays for now.
func checkRecord(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return fmt.Errorf("--record: %w", err)
	}
	return f.Close()
}

// plainPath are the paths that need no escaping in an address and mean nothing to the multiplexer of requests.
var plainPath = regexp.MustCompile(`^(/[A-Za-z0-9_.~-]+)+/?$|^/$`)

// checkPath tells what is wrong with the path of the metrics.
func checkPath(path string) error {
	if !plainPath.MatchString(path) || strings.Contains(path+"/", "/./") || strings.Contains(path+"/", "/../") {
		return fmt.Errorf("--web.telemetry-path: %q is not a path such as /metrics", path)
	}
	for _, taken := range []string{"/api/", "/-/", "/page.js/", "/page.css/"} {
		if strings.HasPrefix(path+"/", taken) {
			return fmt.Errorf("--web.telemetry-path: %q is a path of the exporter's own", path)
		}
	}
	return nil
}

// checkHostIP tells what is wrong with the value of the label host_ip.
func checkHostIP(text string) error {
	if text == "" {
		return nil // the address of the default route
	}
	if _, err := netip.ParseAddr(text); err != nil {
		return fmt.Errorf("--host-ip: %q is not an IP address", text)
	}
	return nil
}

// usage is the template of the help: of the program its commands, each in a sentence, and the flags of all; of a command its own flags alone.
const usage = `{{with .Context.SelectedCommand -}}
usage: gpu-exporter {{.FullCommand}}{{if .Commands}} COMMAND{{end}}{{range .Args}} {{.Name | Upper}}{{end}} [FLAGS]

{{.Help | Wrap 0}}
{{- if .Commands}}
Commands:
{{.FlattenedCommands | CommandsToTwoColumns | FormatTwoColumns -}}
{{end}}
{{- if .Args}}
Arguments:
{{range .Args}}{{template "argument" .}}{{end -}}
{{end}}
{{- if .Flags}}
Flags:
{{.Flags | FlagsToTwoColumns | FormatTwoColumns -}}
{{end}}
The flags of all commands, such as --replay: gpu-exporter --help
{{else -}}
usage: gpu-exporter [COMMAND] [FLAGS]

{{.App.Help | Wrap 0}}
Commands; the flags of each: gpu-exporter COMMAND --help
{{.App.FlattenedCommands | CommandsToTwoColumns | FormatTwoColumns}}
Flags of all commands:
{{.App.Flags | FlagsToTwoColumns | FormatTwoColumns -}}
{{end}}
{{- define "argument"}}  {{.Name | Upper}}  {{.Help}}
{{end}}`

// usageFuncs are what the template needs besides kingpin's own.
var usageFuncs = template.FuncMap{
	"Upper": strings.ToUpper,
	"CommandsToTwoColumns": func(list []*kingpin.CmdModel) (rows [][2]string) {
		for _, c := range list {
			first, _, _ := strings.Cut(c.Help, ". ")
			rows = append(rows, [2]string{c.FullCommand, strings.TrimSuffix(first, ".") + "."})
		}
		return rows
	},
}

// oneLine is an error on one line, as those of YAML are not.
func oneLine(err error) error {
	if strings.Contains(err.Error(), "\n") {
		return errors.New(strings.Join(strings.Fields(err.Error()), " "))
	}
	return err
}

// versionText says which program this is. What the build did not tell is left out.
func versionText() string {
	if info, ok := debug.ReadBuildInfo(); ok && versioninfo.Version == "" {
		versioninfo.Version = info.Main.Version
	}
	text := "gpu-exporter, version " + versioninfo.Version
	for _, line := range [][2]string{{"revision", versioninfo.GetRevision()}, {"branch", versioninfo.Branch}, {"build user", versioninfo.BuildUser},
		{"build date", versioninfo.BuildDate}, {"go version", versioninfo.GoVersion}, {"platform", versioninfo.GoOS + "/" + versioninfo.GoArch},
		{"tags", versioninfo.GetTags()}} {
		if line[1] != "" && line[1] != "unknown" {
			text += fmt.Sprintf("\n  %-12s %s", line[0]+":", line[1])
		}
	}
	return text
}
