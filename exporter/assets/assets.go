// Package assets holds the files that gpu-exporter hands out: rules and scrape configuration for Prometheus, dashboards for Grafana, and what installs it.
package assets

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

//go:generate go run ./generate dashboards

// Files are the assets by path, such as "rules/gpu-exporter.alerts.yaml".
//
//go:embed rules/*.yaml dashboards/*.json install/*
var Files embed.FS

// List returns the paths of all assets in order.
func List() []string {
	var list []string
	fs.WalkDir(Files, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			list = append(list, path)
		}
		return err
	})
	return list
}

// Export writes every asset below dir, which it makes. It writes nothing if a file of other content is in its way, unless force is set.
func Export(dir string, force bool) error {
	for _, path := range List() {
		old, err := os.ReadFile(filepath.Join(dir, path))
		switch {
		case errors.Is(err, fs.ErrNotExist) || force:
		case err != nil:
			return fmt.Errorf("exporting the assets: %w", err)
		default:
			if b, err := Files.ReadFile(path); err != nil || !bytes.Equal(b, old) {
				return fmt.Errorf("exporting the assets: %s is there and differs: export to another directory, or use --force", filepath.Join(dir, path))
			}
		}
	}
	for _, path := range List() {
		b, err := Files.ReadFile(path)
		if err != nil {
			return fmt.Errorf("exporting the assets: %w", err)
		}
		name := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return fmt.Errorf("exporting the assets: %w", err)
		}
		if err := os.WriteFile(name, b, 0o644); err != nil {
			return fmt.Errorf("exporting the assets: %w", err)
		}
	}
	return nil
}
