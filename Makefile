# Targets: build run test lint generate bench clean.
SHELL := /bin/bash
ARCH ?= $(shell go env GOARCH)
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/prometheus/common/version.Version=$(VERSION)
WORKER := exporter/worker/embedded/nvml-worker.gz
export GOFLAGS += -buildvcs=false

.PHONY: build run test lint setup generate check-generate bench clean

build:
	mkdir -p bin $(dir $(WORKER))
	CGO_ENABLED=0 GOARCH=$(ARCH) go build -trimpath -ldflags '-s -w' -o bin/nvml-worker ./cmd/nvml-worker
	gzip -9 -n -c bin/nvml-worker >$(WORKER)
	CGO_ENABLED=0 GOARCH=$(ARCH) go build -trimpath -tags embedworker -ldflags '$(LDFLAGS)' -o bin/gpu-exporter ./cmd/gpu-exporter

run: build
	@if [ -e /dev/nvidiactl ] || [ -d /proc/driver/nvidia ]; then exec bin/gpu-exporter; \
	else echo "no NVIDIA GPU here: serving the built-in recording on :9400"; exec bin/gpu-exporter --replay=demo; fi

setup:
	scripts/setup

test: setup lint
	CGO_ENABLED=0 go test -count=1 -p 1 ./...
	CGO_ENABLED=1 go test -count=1 -p 1 -race -skip TestChurn $$(go list ./... | grep -v -e /probes -e /record-ioctls -e cmd/gpu-exporter)

lint:
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
	go tool staticcheck ./...

generate:
	go generate ./...

check-generate: generate
	git diff --exit-code -- bpf tracer scripts/record-ioctls

bench:
	CGO_ENABLED=0 go test -run '^$$' -bench . -benchtime 200ms ./nvml/... ./tracer/ledger/...

clean:
	rm -rf bin $(WORKER)
