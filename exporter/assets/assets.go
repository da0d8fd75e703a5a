// Package assets holds the files that gpu-exporter hands out: alert rules for Prometheus.
package assets

import "embed"

// Files are the assets by path, such as "rules/gpu-exporter.alerts.yaml".
//
//go:embed rules/*.yaml
var Files embed.FS
