package main

import (
	"os"
	"testing"
)

// TestUpToDate: the dashboards in the tree are those that this generator writes.
func TestUpToDate(t *testing.T) {
	files, err := dashboards()
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("../dashboards")
	if err != nil || len(entries) != len(files) {
		t.Errorf("%d files, %d dashboards: %v", len(entries), len(files), err)
	}
	for name, want := range files {
		if got, err := os.ReadFile("../dashboards/" + name); err != nil || string(got) != string(want) {
			t.Errorf("%s is not what `go generate ./exporter/assets` writes: %v", name, err)
		}
	}
}
