package main

import (
	"os"
	"testing"
)

// TestUpToDate: the table in the README is that of the checks.
func TestUpToDate(t *testing.T) {
	b, err := os.ReadFile("../../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := insert(string(b)); err != nil || text != string(b) {
		t.Errorf("README.md is not what `go generate ./exporter/doctor` writes: %v", err)
	}
	if _, err := insert("no place"); err == nil {
		t.Error("a text without a place for the table is taken")
	}
}
