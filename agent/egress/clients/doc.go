// Package clients leads the packets of this host's clients of egresses into tunnels, and tells the gateways of them:
// pods that name egresses in their annotations or were attached later, and the network namespaces that the
// configuration names.
//
// What a client shall have is planned by values (Plan); each namespace is written by a goroutine of its own, so that a
// slow one holds up no other. What running pods have opted in to is kept in a file.
//
// Source: DESIGN.md section 11 of the project; shared/seeds/coil-egress-nat.txt.
package clients
