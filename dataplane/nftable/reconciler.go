package nftable

import (
	"errors"
	"fmt"
)

// Reconciler keeps one table as it is wanted, and remembers it.
type Reconciler struct {
	*Conn
	cache *State
	fails int
}

// NewReconciler opens a netlink socket, as Open does.
func NewReconciler(ns int) (*Reconciler, error) {
	c, err := Open(ns)
	if err != nil {
		return nil, err
	}
	return &Reconciler{Conn: c}, nil
}

// Forget has the kernel read before the next write.
func (r *Reconciler) Forget() { r.cache = nil }

// State is what the kernel has, as far as it is remembered, else as it is read now.
func (r *Reconciler) State(t Table) (State, error) {
	if r.cache == nil {
		s, err := r.Read(t)
		if err != nil {
			return State{}, r.failed(err)
		}
		r.cache = &s
	}
	return *r.cache, nil
}

// Reconcile makes the table what is wanted, and tells how many messages that took. Without prune nothing is removed
// that is not in the way. When small steps have failed twice it starts over.
func (r *Reconciler) Reconcile(t Table, prune bool) (writes int, err error) {
	have, err := r.State(t)
	if err != nil {
		return 0, err
	}
	ops := Diff(t, have, prune)
	if len(ops) == 0 {
		r.fails = 0
		return 0, nil
	}
	if r.fails > 1 {
		if !prune {
			t = t.covering(have)
		}
		ops = []Op{{Verb: Rebuild, All: t}}
	}
	next, err := have.Apply(ops)
	if err != nil {
		return 0, r.failed(fmt.Errorf("nftables table inet %s: %w", t.Name, err))
	}
	if writes, err = r.Write(t, ops); err != nil {
		return writes, r.failed(err)
	}
	r.cache, r.fails = &next, 0
	return writes, nil
}

func (r *Reconciler) failed(err error) error {
	r.cache = nil
	r.fails++
	return errors.Join(err, r.Renew())
}

// Purge deletes the table, and reports whether it was there.
func (r *Reconciler) Purge(t Table) (bool, error) {
	r.cache = nil
	return r.Delete(t.Name)
}
