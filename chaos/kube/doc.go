// Package kube raises a real Kubernetes on a lab: etcd, kube-apiserver and, with Config.Whole, controller manager and
// scheduler as processes in a node's network namespace, reached by others at its overlay address. The tests of the kube
// tier stand on it, and `make conformance` and `make demo-kubernetes`.
//
// A Cluster alone is a control plane for which Nodes are data. A Fleet is a mesh with Machines (hosts' own file
// systems, as mount namespaces) and Workers (containerd, kubelet, kube-proxy) on them. Programs come from
// .ci/kubernetes-tools, .ci/container-tools and .ci/cni-tools; images are made on this machine (WriteArchive).
//
// Everything ends with Close: processes by mount namespace, containers by control group. A test that is killed leaves
// namespaces of its lab (`skein lab down`) and control groups skein-PID-*.
package kube
