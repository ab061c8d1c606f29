# Kubernetes' own network tests, against a cluster whose nodes are behind NATs. WRITE=docs/conformance.md keeps the
# table; CONFORMANCE_FLAGS: for instance CONFORMANCE_FLAGS="-run HostPort -j 1"
.PHONY: conformance
conformance: setup cni-tools build
	.ci/setup kube
	.ci/conformance $(if $(WRITE),-write $(WRITE)) $(CONFORMANCE_FLAGS)
