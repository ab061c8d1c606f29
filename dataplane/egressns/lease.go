package egressns

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/dataplane"
)

// Sentinel errors.
var (
	// ErrTicket: the ticket is another slot's, was dropped, or is from an earlier run.
	ErrTicket = errors.New("no such ticket")
	// ErrNoQueue: this kernel cannot give packets to a queue.
	ErrNoQueue = errors.New("this kernel has no NFQUEUE for nftables (modules nft_queue, xt_NFQUEUE)")
)

// Ticket is one countdown in the kernel. It has no effect before it is granted to its slot, and none after its end.
type Ticket uint32

// leases writes leases and holds. It has its own socket, so that it never waits for a large Apply.
type leases struct {
	mu      sync.Mutex
	t       *table
	next    Ticket
	granted map[int]Ticket  // in the kernel
	begun   map[int][]begun // tickets that may still run, the oldest first
	held    map[int]bool    // in the kernel
}

type begun struct {
	ticket Ticket
	until  time.Time
}

func openLeases(t *table) (*leases, error) {
	l := &leases{t: t, granted: map[int]Ticket{}, begun: map[int][]begun{}, held: map[int]bool{}}
	var b [4]byte
	_, _ = rand.Read(b[:]) // it never fails
	l.next = Ticket(binary.NativeEndian.Uint32(b[:]))
	// Nothing reads the queue of an earlier run's holds any more.
	t.Nft().FlushSet(setOf(SetHeld))
	if err := t.Nft().Flush(); err != nil {
		return nil, errors.Join(fmt.Errorf("clearing what a former run held: %w", err), t.Renew())
	}
	return l, l.reread()
}

// reread reads from the kernel which slots have which tickets.
func (l *leases) reread() error {
	es, err := l.t.Nft().GetSetElements(setOf(MapGranted))
	if err != nil {
		return fmt.Errorf("reading nftables map %s: %w", MapGranted, err)
	}
	l.granted = map[int]Ticket{}
	for _, e := range es {
		slot, ok := toSlot(string(e.Key))
		ticket, ok2 := toNumber(string(e.Val))
		if ok && ok2 {
			l.granted[slot] = Ticket(ticket)
		}
	}
	return nil
}

// transact fills a transaction and sends it. If the kernel refuses, since another program has changed what is
// remembered here, it rereads the kernel's state and tries once more.
func (l *leases) transact(what string, slot int, fill func() error) error {
	for try := 0; ; try++ {
		err := fill()
		if err == nil {
			err = l.t.Nft().Flush()
		}
		if err == nil {
			return nil
		}
		err = errors.Join(err, l.t.Renew())
		if rerr := l.reread(); rerr != nil || try > 0 {
			return fmt.Errorf("%s of slot %d: %w", what, slot, errors.Join(err, rerr))
		}
	}
}

func checkSlot(slot int) error {
	if slot < 0 || slot > maxSlot {
		return fmt.Errorf("slot %d: want 0 to %d", slot, maxSlot)
	}
	return nil
}

// begin makes a ticket that runs for lease from now on.
func (l *leases) begin(slot int, lease time.Duration) (Ticket, error) {
	if err := checkSlot(slot); err != nil {
		return 0, err
	}
	if lease < time.Millisecond || lease > maxLeaseHours*time.Hour {
		return 0, fmt.Errorf("lease of %s: want 1ms to %dh", lease, maxLeaseHours)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next++
	t := l.next
	now := time.Now()
	live := slices.DeleteFunc(l.begun[slot], func(b begun) bool { return b.until.Before(now) })
	l.begun[slot] = append(live, begun{t, now.Add(lease + time.Second)}) // a margin for different clocks
	err := l.transact("beginning a lease", slot, func() error {
		return l.t.Nft().SetAddElements(setOf(SetTickets),
			[]nftables.SetElement{{Key: []byte(number(uint32(t))), Timeout: lease}})
	})
	return t, err
}

// grant lets the slot's packets pass while the ticket runs.
func (l *leases) grant(slot int, t Ticket) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	ours := func(t Ticket) bool {
		return slices.ContainsFunc(l.begun[slot], func(b begun) bool { return b.ticket == t })
	}
	if !ours(t) {
		return fmt.Errorf("granting ticket %d to slot %d: %w", t, slot, ErrTicket)
	}
	if had, ok := l.granted[slot]; ok && had != t && ours(had) && int32(had-t) > 0 {
		return nil // answers arrived out of order, and the later ticket counts
	}
	return l.transact("granting a lease", slot, func() error {
		m, key := setOf(MapGranted), []byte(slotKey(slot))
		had, ok := l.granted[slot]
		if ok && had == t {
			return nil
		}
		if ok {
			if err := l.t.Nft().SetDeleteElements(m, []nftables.SetElement{{Key: key}}); err != nil {
				return err
			}
		}
		l.granted[slot] = t
		return l.t.Nft().SetAddElements(m, []nftables.SetElement{{Key: key, Val: []byte(number(uint32(t)))}})
	})
}

// drop ends the slot's lease, and all its tickets.
func (l *leases) drop(slot int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var gone []nftables.SetElement
	for _, b := range l.begun[slot] {
		gone = append(gone, nftables.SetElement{Key: []byte(number(uint32(b.ticket))), Timeout: time.Second})
	}
	delete(l.begun, slot) // an answer that arrives later grants nothing
	return l.transact("ending the lease", slot, func() error {
		if _, ok := l.granted[slot]; ok {
			if err := l.t.Nft().SetDeleteElements(setOf(MapGranted),
				[]nftables.SetElement{{Key: []byte(slotKey(slot))}}); err != nil {
				return err
			}
			delete(l.granted, slot)
		}
		if len(gone) == 0 {
			return nil
		}
		// Some may have ended, and deleting a missing element fails: so they are added first.
		if err := l.t.Nft().SetAddElements(setOf(SetTickets), gone); err != nil {
			return err
		}
		return l.t.Nft().SetDeleteElements(setOf(SetTickets), gone)
	})
}

// holdSlot begins or ends holding a slot's packets.
func (l *leases) holdSlot(slot int, on bool) error {
	if err := checkSlot(slot); err != nil {
		return err
	}
	if l.t.hold == holdNot {
		return fmt.Errorf("holding slot %d: %w", slot, ErrNoQueue)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[slot] == on {
		return nil
	}
	l.held[slot] = on
	c, set, key := l.t.Nft(), setOf(SetHeld), []nftables.SetElement{{Key: []byte(slotKey(slot))}}
	err := l.transact("holding packets", slot, func() error {
		err := c.SetAddElements(set, key)
		if err == nil && !on { // it may be missing if the table was made anew
			err = c.SetDeleteElements(set, key)
		}
		return err
	})
	if err != nil {
		l.held[slot] = !on
	}
	return err
}

// know ends the leases of slots that the plan lacks, if the plan is complete.
func (l *leases) know(p plan) error {
	l.mu.Lock()
	var gone []int
	for n := range l.granted {
		if p.complete && !slices.ContainsFunc(p.slots, func(s dataplane.GatewaySlot) bool { return s.Number == n }) {
			gone = append(gone, n)
		}
	}
	l.mu.Unlock()
	var errs []error
	for _, s := range gone {
		errs = append(errs, l.drop(s))
	}
	return errors.Join(errs...)
}

// forget forgets the kernel's state after the table was made anew.
func (l *leases) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.granted, l.held = map[int]Ticket{}, map[int]bool{}
}

func (l *leases) close() error { return l.t.Close() }
