package main

import (
	"fmt"
	"os"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/install"
)

// itself is this program's file, also when its path has another one by now.
const itself = "/proc/self/exe"

func installCommands(app *kingpin.Application) []command {
	const root = "Directory to take for the host's root: nothing is started or stopped."
	in := app.Command("install", "Install this program on this host.").Command("systemd", "Install this program as a systemd service and start it. "+
		"It becomes "+install.Program+", its unit "+install.Unit+". Systemd is not reloaded.")
	inRoot := in.Flag("root", root).Default("/").String()
	printed := in.Flag("print", "Only print the unit.").Bool()
	force := in.Flag("force", "Replace a unit that differs.").Bool()
	out := app.Command("uninstall", "Remove this program from this host.").Command("systemd", "Stop the service and remove the files of install systemd; "+
		install.Flags+" stays.")
	outRoot := out.Flag("root", root).Default("/").String()
	return []command{
		{"install systemd", func(exporter.Config) error {
			if *printed {
				text, err := install.Text()
				if err == nil {
					_, err = os.Stdout.Write(text)
				}
				return err
			}
			if err := checkRoot(*inRoot); err != nil {
				return err
			}
			return (&install.Systemd{Root: *inRoot, Program: itself, Force: *force, Out: os.Stdout}).Install()
		}},
		{"uninstall systemd", func(exporter.Config) error {
			if err := checkRoot(*outRoot); err != nil {
				return err
			}
			return (&install.Systemd{Root: *outRoot, Out: os.Stdout}).Uninstall()
		}},
	}
}

func checkRoot(dir string) error {
	if d, err := os.Stat(dir); err != nil || !d.IsDir() {
		return usageError{fmt.Errorf("--root: %s is not a directory", dir)}
	}
	return nil
}
