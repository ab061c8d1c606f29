// Package kube raises a real Kubernetes control plane on a node of a lab: etcd and kube-apiserver as processes in the
// node's network namespace, reached by others at its overlay address. The tests of the kube tier stand on it.
//
// Nodes are data here: objects without a kubelet. The programs come from .ci/kubernetes-tools; Programs finds them.
package kube
