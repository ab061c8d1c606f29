# skein. The two commands: `make demo` and `make test`. Both run as root on a clean Debian or Ubuntu with Go.
export CALLER_PATH ?= $(PATH)
export PATH := $(CURDIR)/bin/tools:$(PATH)
# The tiers find declared programs alone (.ci/programs); .ci/setup makes the directory.
TIERS := check test-unit test-race test-lab lint test-lint check-generated test-containers test-kernel test-kube test-kube-tools test-systemd
$(TIERS): private export PATH := $(CURDIR)/bin/tools:$(CURDIR)/.cache/path
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
GO_SOURCES := $(shell git ls-files '*.go' go.mod go.sum 2>/dev/null)

.PHONY: build build-dev demo test check test-unit test-race test-lab lint test-lint generate check-generated clean setup cni-tools

build: bin/skein

bin/skein: $(GO_SOURCES) chaos/demo/demo.yaml
	CGO_ENABLED=0 go build -trimpath -ldflags "-X main.version=$(VERSION)" -o $@ ./cmd/skein

# With what measures, proves and attacks it, in labs.
build-dev: bin/skein bin/skein-dev

bin/skein-dev: $(GO_SOURCES) $(wildcard chaos/*/*.yaml)
	CGO_ENABLED=0 go build -trimpath -o $@ ./cmd/skein-dev

# The main job, shown. KEEP=1 leaves the mesh up.
demo: setup build
	bin/skein lab demo

# Every test tier, with a summary at the end.
test:
	.ci/test

# The fast tier, before a commit: build, lint, and the tests that raise no lab. They wait more than they compute.
check: setup build lint
	go test -short -p 4 -timeout 10m $$(go list ./... | grep -v '/examples$$\|/chaos/')

setup:
	@.ci/setup

cni-tools:
	@.ci/cni-tools

test-unit: setup cni-tools
	.ci/helm-tools
	.ci/prometheus-tools
	go test -timeout 15m $$(go list ./... | grep -v '/examples$$\|/chaos/containers$$\|/chaos/kube\|/chaos/service$$')

# Where goroutines share memory.
test-race: setup
	CGO_ENABLED=1 go test -race -short -timeout 10m ./agent/... ./consensus ./dataplane/reconcile ./dataplane/relaynft ./gossip ./internal/simtime ./relay/...

# Every scenario in examples/, with real agents behind real NATs. RUN narrows it: make test-lab RUN=ipv6
RUN ?= .
test-lab: setup
	go test -count=1 -timeout 30m -v -run 'TestExamples/$(RUN)' ./examples

lint test-lint: setup
	.ci/lint

protoc = GOBIN=$(CURDIR)/bin/tools go install tool && protoc -I api --go_out=$(1) --go_opt=paths=source_relative \
	--connect-go_out=$(1) --connect-go_opt=paths=source_relative,simple api/skein/v1/*.proto

generate: setup
	$(call protoc,api)

# Fails when the code here is not what the schema generates.
check-generated: setup
	out=$$(mktemp -d) && { $(call protoc,$$out) && diff -r --exclude='*.proto' api $$out; outcome=$$?; rm -rf $$out; exit $$outcome; }

clean:
	rm -rf bin .cache lab-failures

include $(wildcard *.mk)
