// Generate writes the troubleshooting table of package doctor into a file of Markdown: `go generate ./exporter/doctor`.
package main

import (
	"fmt"
	"os"
	"strings"

	"gpu-exporter/exporter/doctor"
)

// The lines between which the table stands.
const (
	begin = "<!-- gpu-exporter doctor: written by go generate -->\n"
	end   = "<!-- end of gpu-exporter doctor -->\n"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate FILE")
		os.Exit(2)
	}
	b, err := os.ReadFile(os.Args[1])
	if err == nil {
		var text string
		if text, err = insert(string(b)); err == nil {
			err = os.WriteFile(os.Args[1], []byte(text), 0o644)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "generate: %v\n", err)
		os.Exit(1)
	}
}

// insert returns the text with the table in its place.
func insert(text string) (string, error) {
	before, rest, ok := strings.Cut(text, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return "", fmt.Errorf("no lines %q and %q to write between", begin, end)
	}
	return before + begin + doctor.Table() + end + after, nil
}
