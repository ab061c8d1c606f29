package wireguard

import (
	"errors"
	"fmt"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hop"
)

// Reconciler keeps one device as the Spec says. It remembers what it wrote and read last, so that an
// unchanged Spec costs no message and no dump.
type Reconciler struct {
	cfg     OpenConfig
	dev     Device
	driver  string // the one in use; a lost device is opened again with the same
	cache   *State
	pending int // messages sent outside Reconcile, for the next count
}

// NewReconciler opens the device.
func NewReconciler(c OpenConfig) (*Reconciler, error) {
	dev, n, err := Open(c)
	if err != nil {
		return nil, err
	}
	c.Driver = dev.Driver()
	return &Reconciler{cfg: c, dev: dev, driver: dev.Driver(), pending: n}, nil
}

// Name of the subsystem in reports.
func (r *Reconciler) Name() string { return "wireguard" }

// Driver is kernel or userspace.
func (r *Reconciler) Driver() string { return r.driver }

// Done is closed when the device has died; nil when it cannot tell.
func (r *Reconciler) Done() <-chan struct{} { return r.dev.Done() }

// Forget makes the next Reconcile read the device first.
func (r *Reconciler) Forget() { r.cache = nil }

// Reconcile makes the device what the Spec says and returns how many messages that took.
func (r *Reconciler) Reconcile(s dataplane.Spec) (writes int, notes []string, err error) {
	return r.reconcile(s, false)
}

// Repair is Reconcile for changes somebody else made. Endpoints of existing peers stay: a peer that
// roamed is no damage.
func (r *Reconciler) Repair(s dataplane.Spec) (writes int, notes []string, err error) {
	return r.reconcile(s, true)
}

func (r *Reconciler) reconcile(s dataplane.Spec, keepEndpoints bool) (writes int, notes []string, err error) {
	writes, r.pending = r.pending, 0
	defer func() {
		if err != nil {
			r.cache = nil
		}
	}()
	r.dev.SetMTU(s.Link.MTU)
	if err := r.load(&writes); err != nil {
		return writes, nil, err
	}
	want, notes := Want(s.WireGuard)
	o := Options{KeepEndpoints: keepEndpoints}
	if !r.dev.HasHops(s.Hops) { // after what new ways lead to has come, and before what the old ones led to goes
		if err := r.write(Diff(want, *r.cache, o), &writes); err != nil {
			return writes, notes, err
		}
	}
	notes = append(notes, r.dev.SetHops(s.Hops)...)
	o.Prune = s.Complete
	return writes, notes, r.write(Diff(want, *r.cache, o), &writes)
}

// write sends operations in batches, and counts these.
func (r *Reconciler) write(ops []Op, writes *int) error {
	if len(ops) == 0 {
		return nil
	}
	for _, b := range Batches(ops) {
		if err := r.dev.Write(b); err != nil {
			return err
		}
		*writes++
	}
	next := r.cache.Apply(ops)
	r.cache = &next
	return nil
}

// HopCounts are the packets of hops since the device was opened.
func (r *Reconciler) HopCounts() hop.Counts { return r.dev.HopCounts() }

// load fills the cache, and opens the device anew if it is gone.
func (r *Reconciler) load(writes *int) error {
	if r.cache != nil {
		return nil
	}
	s, _, err := r.dev.Read()
	if errors.Is(err, ErrGone) {
		_ = r.dev.Close()
		dev, n, oerr := Open(r.cfg)
		*writes += n
		if oerr != nil {
			return fmt.Errorf("opening the WireGuard device again: %w", oerr)
		}
		r.dev = dev
		s, _, err = dev.Read()
	}
	if err != nil {
		return err
	}
	r.cache = &s
	return nil
}

// Status reads the device. changed says that somebody else changed more than endpoints since the last
// Reconcile or Status; the next Repair puts it right.
func (r *Reconciler) Status() (peers []dataplane.PeerStatus, changed bool, err error) {
	s, peers, err := r.dev.Status()
	if err != nil {
		r.cache = nil
		return nil, errors.Is(err, ErrGone), err
	}
	if r.cache == nil {
		return peers, false, nil
	}
	if s != nil {
		changed = len(Diff(*r.cache, *s, Options{Prune: true, KeepEndpoints: true})) > 0
		r.cache = s
		return peers, changed, nil
	}
	for _, p := range peers { // who roamed is put right by the next Reconcile
		if c, ok := r.cache.Peers[p.PublicKey]; ok && c.Endpoint != p.Endpoint {
			c.Endpoint = p.Endpoint
			r.cache.Peers[p.PublicKey] = c
		}
	}
	return peers, false, nil
}

// Diff tells what Reconcile would do, from a fresh read.
func (r *Reconciler) Diff(s dataplane.Spec) ([]string, error) {
	actual, _, err := r.dev.Read()
	if errors.Is(err, ErrGone) {
		actual, err = State{}, nil
	}
	if err != nil {
		return nil, err
	}
	want, _ := Want(s.WireGuard)
	var out []string
	for _, op := range Diff(want, actual, Options{Prune: s.Complete}) {
		out = append(out, op.String())
	}
	if !r.dev.HasHops(s.Hops) {
		out = append(out, fmt.Sprintf("set hops: %d ways, %d guards", len(s.Hops.Routes), len(s.Hops.Guards)))
	}
	return out, nil
}

// Close lets go of the device; a kernel device goes on forwarding.
func (r *Reconciler) Close() error { return r.dev.Close() }
