// Package nft keeps the nftables table "inet skein": two sets of destinations that go through the
// tunnel, and two chains that mark packets for them.
//
// Another chain drops, before everything else, what comes in under a source address that is not its sender's
// (sources.go).
//
// While some peer is reached through another port than WireGuard's (dataplane.PortRewrite), two more chains rewrite
// ports, before conntrack on the way in and after it on the way out, without any state: a rewrite holds from the
// moment it is written, for flows that are under way too, and conntrack and firewalls see WireGuard's port alone.
//
// While there are networks behind this host that other sites know under other addresses (dataplane.Translation), two
// more chains translate them in the same way (translate.go, docs/decisions/0058).
//
// Want declares the table, and package nftable writes it: a changed destination costs one or two messages however large
// the sets are. The table is wholly ours: what somebody adds to it is pruned, and no other table is ever touched.
//
// A Reconciler belongs to one goroutine. Sources: DESIGN.md section 9, the KubeSpan seed, FIELD.md.
package nft
