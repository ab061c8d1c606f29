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

// What callers decide by.
var (
	// ErrTicket says that a ticket is of no use: another slot's, dropped, or of a former run.
	ErrTicket = errors.New("no such ticket")
	// ErrNoQueue says that this kernel cannot hand packets to a queue.
	ErrNoQueue = errors.New("this kernel has no NFQUEUE for nftables (modules nft_queue, xt_NFQUEUE)")
)

// Ticket is one countdown in the kernel. It does nothing until it is granted to its slot, and nothing after it ran out.
type Ticket uint32

// leases writes what concerns leases and holding. It has a socket of its own, so that it never waits for a large Apply.
type leases struct {
	mu      sync.Mutex
	t       *table
	next    Ticket
	granted map[int]Ticket  // as the kernel has it
	begun   map[int][]begun // tickets that may live, the oldest first
	held    map[int]bool    // as the kernel has it
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
	// What a former run held nobody takes out of the queue any more.
	t.Nft().FlushSet(setOf(SetHeld))
	if err := t.Nft().Flush(); err != nil {
		return nil, errors.Join(fmt.Errorf("clearing what a former run held: %w", err), t.Renew())
	}
	return l, l.reread()
}

// reread takes from the kernel which slots have which tickets.
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

// transact fills a transaction and sends it. When the kernel refuses, because somebody has changed what was remembered,
// it is filled anew after a look at the kernel.
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

// begin makes a ticket that lives for lease from now on.
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
	l.begun[slot] = append(live, begun{t, now.Add(lease + time.Second)}) // not too early by another clock
	err := l.transact("beginning a lease", slot, func() error {
		return l.t.Nft().SetAddElements(setOf(SetTickets),
			[]nftables.SetElement{{Key: []byte(number(uint32(t))), Timeout: lease}})
	})
	return t, err
}

// grant lets the slot's packets pass as long as the ticket lives.
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
		return nil // answers overtook each other, and the later one counts
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
	delete(l.begun, slot) // an answer that is still to come grants nothing
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
		// Some may have run out, and what is not there cannot be deleted: they are added first.
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
		if err == nil && !on { // it may not have been there, when the table was made anew
			err = c.SetDeleteElements(set, key)
		}
		return err
	})
	if err != nil {
		l.held[slot] = !on
	}
	return err
}

// know is told the slots that there are; when that is all, what others have is ended.
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

// forget is told that the table was made anew.
func (l *leases) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.granted, l.held = map[int]Ticket{}, map[int]bool{}
}

func (l *leases) close() error { return l.t.Close() }
