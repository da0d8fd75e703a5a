// Generate writes the Grafana dashboards of package assets: `go generate ./exporter/assets`.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate DIR")
		os.Exit(2)
	}
	files, err := dashboards()
	for name, b := range files {
		if err == nil {
			err = os.WriteFile(filepath.Join(os.Args[1], name), b, 0o644)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "generate: %v\n", err)
		os.Exit(1)
	}
}

// dashboards returns the text of every dashboard by the name of its file.
func dashboards() (map[string][]byte, error) {
	files := map[string][]byte{}
	for name, b := range map[string]*board{"host": host(), "containers": containers(), "health": health(), "pcie": pcie(), "fleet": fleet()} {
		d, err := b.Build()
		if err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", name, err)
		}
		text, err := marshal(d)
		if err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", name, err)
		}
		files[name+".json"] = text
	}
	return files, nil
}

//lint:ignore SA1019 the second version of the schema cannot be imported by the Grafana that most run
func marshal(d dashboard.Dashboard) ([]byte, error) {
	text, err := json.MarshalIndent(d, "", " ")
	if err != nil {
		return nil, err
	}
	return append(text, '\n'), nil
}
