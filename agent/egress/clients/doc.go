// Package clients sends the packets of this host's egress clients into tunnels, and informs the gateways about these
// clients: pods that name egresses in their annotations or were attached later, and network namespaces from the
// configuration.
//
// Plan decides as a pure function what each client gets. A goroutine per namespace writes it, so that a slow one does
// not delay the others. A file keeps the egresses that running pods have chosen.
//
// Source: DESIGN.md section 11 of the project; shared/seeds/coil-egress-nat.txt.
package clients
