# The kube tier: a real apiserver and etcd, and agents behind NATs that reach it through the mesh.
.PHONY: test-kube
test-kube: setup
	.ci/setup kube
	.ci/kubernetes-tools
	go test -count=1 -timeout 10m -v ./chaos/kube
