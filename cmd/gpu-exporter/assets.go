package main

import (
	"fmt"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/assets"
)

func assetsCommands(app *kingpin.Application) []command {
	c := app.Command("assets", "Rules, dashboards and files to install with, which are built in.")
	c.Command("list", "List the files that are built in.")
	export := c.Command("export", "Write the files that are built in into a directory.")
	dir := export.Arg("dir", "The directory; made if need be.").Required().String()
	force := export.Flag("force", "Replace files that differ.").Bool()
	return []command{
		{"assets list", func(exporter.Config) error {
			for _, path := range assets.List() {
				fmt.Println(path)
			}
			return nil
		}},
		{"assets export", func(exporter.Config) error {
			err := assets.Export(*dir, *force)
			if err == nil {
				fmt.Printf("%d files are in %s\n", len(assets.List()), *dir)
			}
			return err
		}},
	}
}
