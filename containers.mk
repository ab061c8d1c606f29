# Real containers: containerd and runc on three lab nodes, started through the installed CNI plugin.
.PHONY: test-containers
test-containers: setup
	.ci/containers
