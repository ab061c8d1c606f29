// Package kerneltest runs test binaries, and lab files, against a kernel that has what the machine's own
// may lack: WireGuard, FoU, IPIP, netem. Where the machine's kernel has them all they run on it; else in
// a QEMU guest with Debian's cloud kernel.
//
// The guest is a kernel and an initramfs of two parts: modules, cached by kernel version, and what is to
// run. Its first process is guestinit, which is also the kernel's modprobe. Results come over the serial
// line; a run passes only when the guest says so with its last line, so that a panic, a hang or a cut
// line is a failure.
//
// Source: FIELD.md, "A kernel to test against".
package kerneltest
