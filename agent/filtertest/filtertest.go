// Package filtertest has public nodes with STUN servers answer for each other: from an address to which a STUN client
// has not sent (RFC 5780), which shows what its NAT lets in, and to a port that a router has granted, which shows
// whether the router forwards it.
package filtertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate/portmap"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// Limits of Prove.
const (
	proofNodes = 2
	proofTries = 2
	proofWait  = 700 * time.Millisecond
)

// Tests asks other nodes for such answers, and gives them. Its functions may be called from any goroutine.
type Tests struct {
	// Helpers are the other nodes that are alive and have a STUN server.
	Helpers func() []identity.ID
	Ask     func(context.Context, identity.ID, *skeinv1.FilterTestRequest) error
	// Await reports by its channel that a STUN answer with this transaction ID has arrived.
	Await func(tx [12]byte) (heard <-chan struct{}, stop func())
	// Server is this node's STUN server; nil: it has none.
	Server func() *stunserver.Server
}

// Delegate has another node answer a STUN client, from an address that the client has not contacted.
func (t Tests) Delegate(ctx context.Context, to netip.AddrPort, tx [12]byte) error {
	var errs []error
	for _, id := range t.Helpers() {
		err := t.Ask(ctx, id, &skeinv1.FilterTestRequest{Address: to.String(), TransactionId: tx[:]})
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(append(errs, errors.New("no other public node could answer the STUN client from its "+
		"own address"))...)
}

// Prove has other nodes send a packet to the address that the router granted, from a port that this host has never sent
// to, and checks whether it arrives.
func (t Tests) Prove(ctx context.Context, outer netip.AddrPort) portmap.Proof {
	asked := 0
	for _, id := range t.Helpers() {
		if asked == proofNodes {
			break
		}
		sent := false
		for range proofTries {
			arrived, err := t.try(ctx, id, outer)
			if arrived {
				return portmap.Proven
			}
			sent = sent || err == nil
		}
		if sent {
			asked++
		}
	}
	if asked == 0 {
		return portmap.Unproven // no node could be asked
	}
	return portmap.Disproven
}

// try has one node send one packet. err is set when the node could not be asked.
func (t Tests) try(ctx context.Context, id identity.ID, outer netip.AddrPort) (arrived bool, err error) {
	var tx [12]byte
	_, _ = rand.Read(tx[:])
	heard, stop := t.Await(tx)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, proofWait)
	defer cancel()
	err = t.Ask(ctx, id, &skeinv1.FilterTestRequest{Address: outer.String(), TransactionId: tx[:], Silent: true})
	select {
	case <-heard:
		return true, err
	case <-ctx.Done():
		return false, err
	}
}

// Answer sends the answer that another node's Delegate or Prove asked for.
func (t Tests) Answer(_ context.Context, _ identity.ID, r *skeinv1.FilterTestRequest) error {
	to, err := netip.ParseAddrPort(r.GetAddress())
	if err != nil || len(r.GetTransactionId()) != 12 {
		return fmt.Errorf("filter test: address %q or transaction ID of %d bytes is malformed", r.GetAddress(),
			len(r.GetTransactionId()))
	}
	if err := checkTarget(to); err != nil {
		return err
	}
	s := t.Server()
	if s == nil {
		return errors.New("this node answers no STUN")
	}
	return s.Answer(to, [12]byte(r.GetTransactionId()), r.GetSilent())
}

// checkTarget refuses addresses that are not public. A member could otherwise have packets sent to this host or its
// networks. What a NAT lets in is a question about public addresses only.
func checkTarget(to netip.AddrPort) error {
	if !addr.Public(to.Addr().Unmap()) || to.Port() == 0 {
		return fmt.Errorf("filter test: %s is not a public address and port", to)
	}
	return nil
}
