# The kube tier: a real Kubernetes, with kubelets and containerd, on agents behind NATs. RUN narrows it: make test-kube RUN=TestFleet.
# One cluster is up at a time: two take both processors for so long that packets are lost, and together take as long as one after
# the other.
.PHONY: test-kube test-kube-tools
test-kube: setup cni-tools test-kube-tools
	go test -count=1 -timeout 35m -v -run '$(RUN)' ./chaos/kube ./chaos/kube/conformance

# The programs of the kube tier; building them the first time takes longer than the tests. make test does it beside another tier.
test-kube-tools: setup
	.ci/setup kube
	.ci/kubernetes-tools
	.ci/container-tools
	.ci/helm-tools

# deploy/kubernetes, made from the chart.
.PHONY: manifests
manifests:
	.ci/helm-tools
	go test -count=1 ./deploy -update

# A Kubernetes cluster on nodes behind NATs, shown: it outlives its apiserver.
.PHONY: demo-kubernetes
demo-kubernetes: setup build cni-tools
	.ci/setup kube
	.ci/kubernetes-tools
	.ci/container-tools
	go run ./chaos/kube/demo

# What Kubernetes' news, pods' starts and a thousand Nodes cost, beside the targets. WRITE=docs/bench.md keeps the table.
.PHONY: bench-kube
bench-kube: setup build cni-tools
	.ci/setup kube
	.ci/kubernetes-tools
	.ci/container-tools
	go run ./chaos/kube/bench $(if $(WRITE),-write $(WRITE)) $(if $(ONLY),-only $(ONLY))
