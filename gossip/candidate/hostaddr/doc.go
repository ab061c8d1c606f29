// Package hostaddr is the step of discovery that needs nobody's help: the addresses of this host's links, IPv6
// included, and the one that the configuration names. Kernel reads and watches them, and the gateways of the default
// routes, for all steps.
//
// Left out are addresses that lie inside a tunnel, that mean something only inside this host, and that the kernel
// itself would not use as a source for long. What is chosen is decided by pure functions.
package hostaddr
