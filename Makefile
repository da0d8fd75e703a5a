# Targets: build run test test-vm lint generate image cross deb bench soak clean.
SHELL := /bin/bash
ARCH ?= $(shell go env GOARCH)
BIN ?= bin
IMAGE ?= gpu-exporter:latest
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/prometheus/common/version.Version=$(VERSION)
# Packages where nothing is hot are not inlined: a binary smaller by 0.8 MB.
COLD := crypto vendor text html golang.org/x go.yaml.in github.com/docker github.com/cilium github.com/alecthomas github.com/gdamore
GCFLAGS := $(COLD:%=-gcflags=%/...=-l)
WORKER := exporter/worker/embedded/nvml-worker.gz
export GOFLAGS += -buildvcs=false

.PHONY: build print-gcflags cross image deb run test lint setup generate check-generate bench soak clean test-vm

build:
	mkdir -p $(BIN) $(dir $(WORKER))
	CGO_ENABLED=0 GOARCH=$(ARCH) go build -trimpath $(GCFLAGS) -ldflags '-s -w' -o $(BIN)/nvml-worker ./cmd/nvml-worker
	gzip -9 -n -c $(BIN)/nvml-worker >$(WORKER)
	CGO_ENABLED=0 GOARCH=$(ARCH) go build -trimpath $(GCFLAGS) -tags embedworker,tcell_minimal -ldflags '$(LDFLAGS)' -o $(BIN)/gpu-exporter ./cmd/gpu-exporter

# The tests build the same program elsewhere.
print-gcflags:
	@echo $(GCFLAGS)

# Both architectures, in bin/amd64 and bin/arm64.
cross:
	$(MAKE) build ARCH=amd64 BIN=bin/amd64
	$(MAKE) build ARCH=arm64 BIN=bin/arm64

# The image holds the static program alone: building it asks no registry for anything.
image: build
	docker build -q --build-arg BIN=$(BIN) -t $(IMAGE) .

# The Debian package, in bin.
deb: build
	scripts/deb $(ARCH) $(BIN) $(VERSION) $(shell git log -1 --format=%ct 2>/dev/null)

run: build
	@if [ -d /proc/driver/nvidia ]; then exec bin/gpu-exporter; \
	else echo "no NVIDIA GPU here: serving the built-in recording on :9400"; exec bin/gpu-exporter --replay=demo; fi

setup:
	scripts/setup

test: setup lint check-generate
	CGO_ENABLED=0 go test -count=1 -p 1 ./...
	CGO_ENABLED=1 go test -count=1 -p 1 -race -skip TestChurn $$(go list ./... | grep -v -e /probes -e /record-ioctls -e cmd/gpu-exporter)
	scripts/test-vm bookworm

# The tracer on the kernels of three Debian releases, in both modes; the table goes to docs/kernels.md.
test-vm: setup
	scripts/test-vm --write

lint:
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	clang-format-16 --dry-run -Werror bpf/*.[ch]
	go vet ./...
	go tool staticcheck ./...

generate:
	go generate ./...

# Generated files are those of the sources: compared by their sums, so that work not yet committed and a tree without git can be tested too.
GENERATED = { find tracer scripts exporter/assets/dashboards docs -name '*_bpfel.*' -o -name '*.json' -o -name '*.md'; echo README.md; }
check-generate:
	@before=$$($(GENERATED) | sort | xargs sha256sum); $(MAKE) -s generate || exit; \
	diff <(echo "$$before") <($(GENERATED) | sort | xargs sha256sum) || { echo "make generate changes these: commit what it writes" >&2; exit 1; }

# What the exporter costs, on a fake host beside a C program that makes the same NVML calls: one table, no GPU. Needs root, as the tracer does.
# make bench SCALE=docs/scale.svg measures hosts of up to 16 GPUs and 1000 containers too, and draws it.
bench: build
	CGO_ENABLED=0 go run ./scripts/bench --hosts $(BIN)/gpu-exporter --warm $(or $(WARM),10) --seconds $(or $(SECONDS_EACH),20) $(SCALE:%=--scale %)

# Does anything grow while containers and processes come and go at RATE times what is usual? DURATION is how long. Needs root and a Docker engine's programs.
soak: build
	CGO_ENABLED=0 go run ./scripts/soak --exporter $(BIN)/gpu-exporter --for $(or $(DURATION),10m) --rate $(or $(RATE),20)

clean:
	rm -rf bin $(WORKER)
