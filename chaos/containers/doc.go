// Package containers shows real containers in the mesh: Debian's containerd and runc on three lab nodes, each with its
// own mount namespace, root file systems made of busybox, started and deleted through the CNI plugin that `skein cni
// install` has put there. It is a test; .ci/containers fetches the programs and runs it.
package containers
