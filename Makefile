export PATH := $(CURDIR)/bin/tools:$(PATH)

.PHONY: build generate

build:
	CGO_ENABLED=0 go build -trimpath -o bin/skein ./cmd/skein

generate:
	GOBIN=$(CURDIR)/bin/tools go install tool
	protoc -I api --go_out=api --go_opt=paths=source_relative --connect-go_out=api --connect-go_opt=paths=source_relative,simple api/skein/v1/*.proto
