// Package podnet makes and removes the links of pods: a veth pair each, the pod's addresses, its default route by way
// of 169.254.1.1 and the host end's link-local address, and the host's routes to it in table 116.
//
// Add leaves nothing behind when it fails, and Del succeeds for what is gone. Everything works in the calling thread's
// network namespace and, for the pod's side, in the one whose path is given; calls for different pods may run at the
// same time. The host's end carries an alias by which Scan knows whose it is, so that no file is needed for that.
//
// Source: DESIGN.md sections 10 and 14; shared/seeds/coil-v2-design.txt.
package podnet
