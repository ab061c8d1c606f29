package ipam

import (
	"net/netip"
	"time"
)

// view is the part of the agreed state that matters to this node. The core reads the log through nothing else.
type view struct {
	Index  uint64
	Pools  map[string]poolView
	Blocks []blockView         // this node's
	Grants map[quotaKey]uint32 // this node's
	Held   []staticView        // static addresses that this node holds
}

type poolView struct {
	Name      string
	Draining  bool
	BlockSize uint64 // addresses of each family
	MaxBlocks uint32 // for one node; 0: no limit
	Cooldown  time.Duration
	Sticky    time.Duration
	Quotas    map[string]uint32 // namespace → addresses in the whole cluster
}

type blockKey struct {
	Pool   string
	Number uint64
}

type blockView struct {
	Key        blockKey
	IPv4, IPv6 netip.Prefix // one of the two may be invalid
	Index      uint64       // of the event that allocated it
}

// prefix names the block in messages.
func (v blockView) prefix() netip.Prefix {
	if v.IPv4.IsValid() {
		return v.IPv4
	}
	return v.IPv6
}

type quotaKey struct{ Pool, Namespace string }

type staticView struct {
	Pool, Namespace, Pod string
	IPv4, IPv6           netip.Addr
	Holder               string // node ID; empty: none
	Index                uint64 // of the last event about it
}

// addr is the address that identifies it in the log.
func (v staticView) addr() netip.Addr {
	if v.IPv4.IsValid() {
		return v.IPv4
	}
	return v.IPv6
}

func (v staticView) has(a netip.Addr) bool { return a.IsValid() && (v.IPv4 == a || v.IPv6 == a) }
