// Package plainwg answers plain WireGuard peers: hosts that run a stock WireGuard and no skein.
//
// A stock client knows one endpoint for each peer, and follows a peer whose authenticated packets come from another
// address (roaming, section 2.1 of the WireGuard paper). So the nodes that carry a plain peer answer it under one key,
// made for that peer alone, and the node that takes the peer over begins a session itself: the client follows. The
// client's configuration has each carrier under the node's own key, too. No packets go there but keepalives, which keep
// the way through the client's NAT open, and tell the carrier where the client is. docs/decisions/0055 has the reasons.
//
// Both kinds of sessions use one UDP socket of each family, so that they share the NAT's mapping. A Carrier splits what
// comes: handshakes by the key that they are for (mac1), everything else by the index that its device has given. Each
// plain peer has a wireguard-go device of its own, since its key is its own; all of them share one TUN link, by
// destination.
//
// Carrier's methods may be called by one goroutine at a time. What a peer sends was checked against its prefixes by
// WireGuard.
package plainwg
