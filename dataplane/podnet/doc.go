// Package podnet makes and removes the links of pods: a veth pair each, the pod's addresses, its default routes via
// 169.254.1.1 and the host end's link-local address, and the host's routes to the pod in table 116.
//
// Add leaves nothing behind when it fails, and Del succeeds if there is nothing to remove. All functions work in the
// calling thread's network namespace and, for the pod's end, in the one at the given path; calls for different pods
// may run concurrently. The alias of the host's end identifies the pod for Scan, so that no file is needed.
//
// Source: DESIGN.md sections 10 and 14; shared/seeds/coil-v2-design.txt.
package podnet
