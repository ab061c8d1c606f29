# The cluster with its apiserver and etcd killed, under load, for OUTAGE; make test has a minute of it.
OUTAGE ?= 10m
.PHONY: kube-outage
kube-outage: private export PATH := $(CURDIR)/bin/tools:$(CURDIR)/.cache/path
kube-outage: setup cni-tools
	.ci/setup kube
	.ci/kubernetes-tools
	.ci/container-tools
	SKEIN_OUTAGE=$(OUTAGE) go test -count=1 -timeout 0 -v -run 'TestOutage$$' ./chaos/kube
