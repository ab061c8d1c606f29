package relaynft

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

const (
	// lifetime is how long the kernel forwards for a relay that does not renew.
	lifetime = 15 * time.Minute
	// adoptFor is how long flows of a former run go on: its clients have a new session long before, and new ports.
	adoptFor = time.Minute
	// resync is how often all is read again, for notifications that were lost: a relay may have thousands of pairs.
	resync = 5 * time.Minute
)

// Mapping is one pair: the addresses of ours that its ends send to, and where their packets come from. All are of one
// family.
type Mapping struct {
	ALocal, ARemote netip.AddrPort
	BLocal, BRemote netip.AddrPort
}

func (m Mapping) zero() bool { return m == Mapping{} }

// Config opens a Table.
type Config struct {
	Numbers dataplane.Numbers // its RelayNftTable is the table's name, in family inet; the zero value: the default ones
	// NetNS is the file descriptor of the network namespace; 0: the calling thread's.
	NetNS int
	// Proc is where the namespace's /proc/sys is read; "": /proc/sys. For tests.
	Proc string
	Log  *slog.Logger // nil: nothing is logged
}

// Table is our table in the kernel.
type Table struct {
	proc    string
	numbers dataplane.Numbers

	mu    sync.Mutex
	nft   *nftable.Conn
	ct    *conntrack.Conn
	pairs map[flow]Mapping   // that are wanted, by both their flows
	stale map[flow]time.Time // of a former run, and when they end
	timer *time.Timer

	listener rtnl.Listener
	stop     context.CancelFunc
	ended    chan struct{} // the runner has
}

// flow is what a client sends to its reserved port.
type flow struct{ from, to netip.AddrPort }

// Open makes the table, or takes over one that a former run has left: what that forwarded goes on for a minute.
func Open(c Config) (*Table, error) {
	t := &Table{
		proc: c.Proc, numbers: c.Numbers.Filled(), pairs: map[flow]Mapping{}, stale: map[flow]time.Time{},
	}
	if t.proc == "" {
		t.proc = "/proc/sys"
	}
	var err error
	if t.nft, err = nftable.Open(c.NetNS); err != nil {
		return nil, err
	}
	if t.ct, err = conntrack.Open(c.NetNS); err != nil {
		return nil, errors.Join(err, t.nft.Close())
	}
	t.adopt()
	if _, err := t.build(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	t.watch(c)
	return t, nil
}

// watch has what others change repaired, until Close.
func (t *Table) watch(c Config) {
	target := &reconcile.Target{Name: "relay forwarding"}
	target.Reconcile = func(context.Context, reconcile.Cause) reconcile.Result { return t.repair() }
	policy := reconcile.Default
	policy.Resync = resync
	runner := reconcile.New(reconcile.Options{Policy: policy, Log: c.Log}, target)
	changed := func() { runner.Mark(reconcile.Changed, target) }
	t.listener.Log = c.Log
	if err := t.listener.Tables(c.NetNS, rtnl.When(t.foreign, changed)); err != nil && c.Log != nil {
		c.Log.Warn("cannot watch nftables: drift of relay forwarding is repaired late", "error", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	t.stop, t.ended = stop, make(chan struct{})
	go func() { defer close(t.ended); runner.Run(ctx) }()
}

// foreign says whether a notification is about a change of the table by somebody else.
func (t *Table) foreign(m netlink.Message) bool {
	return nftable.Concerns(m, t.numbers.RelayNftTable, t.nft.PortID())
}

// repair makes the table whole, with the elements of all pairs.
func (t *Table) repair() (r reconcile.Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Writes, r.Err = t.build(); r.Err != nil {
		return r
	}
	missing, err := t.missing()
	for _, m := range missing {
		if err == nil {
			err = t.drop(flows(m)) // a part of it may be there, or lead elsewhere
		}
		if err == nil {
			err = t.replace(Mapping{}, m)
		}
		if err == nil {
			err = forget(t.ct, flows(m))
		}
		r.Writes++
	}
	r.Err = err
	return r
}

// missing are the pairs that are not in the kernel as a whole.
func (t *Table) missing() (out []Mapping, err error) {
	have := map[string]map[string]string{}
	for f, m := range t.pairs {
		if f != flows(m)[0] { // it comes by its other flow
			continue
		}
		whole := true
		for _, e := range elements(m) {
			if have[e.set] == nil {
				if have[e.set], err = t.elements(e.set); err != nil {
					return nil, err
				}
			}
			for _, x := range e.elements {
				whole = whole && have[e.set][string(x.Key)] == string(x.Val)
			}
		}
		if !whole {
			out = append(out, m)
		}
	}
	return out, nil
}

// unwant takes a mapping from those that are wanted.
func (t *Table) unwant(m Mapping) {
	for _, f := range flows(m) {
		if t.pairs[f] == m {
			delete(t.pairs, f)
		}
	}
}

// elements are those of a map, by key.
func (t *Table) elements(set string) (map[string]string, error) {
	es, err := t.nft.Nft().GetSetElements(t.named(set))
	out := map[string]string{}
	for _, e := range es {
		out[string(e.Key)] = string(e.Val)
	}
	return out, t.renewed(err)
}

// Close lets go of the kernel, and leaves everything in place.
func (t *Table) Close() error {
	if t.stop != nil {
		t.stop()
		<-t.ended
	}
	err := t.listener.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.timer != nil {
		t.timer.Stop()
	}
	return errors.Join(err, t.ct.Close(), t.nft.Close())
}

// build makes chains and rules whole, and keeps the elements that are there. A table of our name and another shape is
// made anew.
func (t *Table) build() (writes int, err error) {
	want := layout(t.numbers)
	have, err := t.nft.Read(want)
	if err != nil {
		return 0, t.renewed(err)
	}
	ops := nftable.Diff(want, have, true)
	if len(ops) > 0 && ops[0].Verb == nftable.Rebuild {
		clear(t.stale)
	}
	writes, err = t.nft.Write(want, ops)
	return writes, t.renewed(err)
}

// renewed makes a new socket after an error: a transaction that was refused may leave answers behind that would be
// taken for later ones'.
func (t *Table) renewed(err error) error {
	if err != nil {
		return errors.Join(err, t.nft.Renew())
	}
	return nil
}

// flush sends what was given to the socket.
func (t *Table) flush() error { return t.renewed(t.nft.Nft().Flush()) }

// adopt notes what a former run has left, if anything. The caller is alone with t.
func (t *Table) adopt() {
	end := time.Now().Add(adoptFor)
	for _, f := range t.left() {
		t.stale[f] = end
	}
	if len(t.stale) > 0 {
		t.timer = time.AfterFunc(adoptFor, func() { _ = t.endStale() })
	}
}

// left are the flows that the kernel's maps have, of whoever wrote them. A map that is not there, or has another shape,
// has none of ours.
func (t *Table) left() (out []flow) {
	for _, name := range []string{mapFlows4, mapFlows6} {
		elements, _ := t.nft.Nft().GetSetElements(t.named(name))
		for _, e := range elements {
			if f, ok := decodeFlow(e.Key); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

// Stale tells whether a former run's flows still use a port, so that it must not be reserved again yet.
func (t *Table) Stale(port uint16) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for f := range t.stale {
		if f.to.Port() == port {
			return true
		}
	}
	return false
}

// endStale ends what a former run has left.
func (t *Table) endStale() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var flows []flow
	for f := range t.stale {
		flows = append(flows, f)
	}
	clear(t.stale)
	err := t.drop(flows)
	return errors.Join(err, forget(t.ct, flows))
}

// Map replaces a mapping by another, in one transaction; the zero Mapping stands for none. The flows are then taken out
// of the connection table, which else would go on as before. A mapping that could not be written is not tried again.
func (t *Table) Map(old, new Mapping) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unwant(old)
	for _, f := range flows(new) {
		t.unwant(t.pairs[f]) // which has not been replaced by its name
		t.pairs[f] = new
	}
	err := t.replace(old, new)
	if err != nil {
		// Somebody has changed the table: make it whole, and remove what is in the way.
		if _, err = t.build(); err == nil {
			if err = t.drop(append(flows(old), flows(new)...)); err == nil {
				err = t.replace(Mapping{}, new)
			}
		}
	}
	if err != nil {
		t.unwant(new) // the caller forwards it by other means, and never takes it back
		return fmt.Errorf("writing a pair into nftables table inet %s: %w", t.numbers.RelayNftTable, err)
	}
	return forget(t.ct, append(flows(old), flows(new)...))
}

// replace adds the old elements before it deletes them: some may have run out, and what is not there cannot be deleted.
func (t *Table) replace(old, new Mapping) error {
	for _, step := range []struct {
		m   Mapping
		del bool
	}{{old, false}, {old, true}, {new, false}} {
		if step.m.zero() {
			continue
		}
		for _, e := range elements(step.m) {
			s := t.named(e.set)
			var err error
			if step.del {
				err = t.nft.Nft().SetDeleteElements(s, e.elements)
			} else {
				err = t.nft.Nft().SetAddElements(s, e.elements)
			}
			if err != nil {
				return err
			}
		}
	}
	return t.flush()
}

// drop deletes all elements that lead the flows anywhere, and those that belong to them in the other map.
func (t *Table) drop(gone []flow) error {
	for _, names := range [][2]string{{mapFlows4, mapSources4}, {mapFlows6, mapSources6}} {
		have, err := t.nft.Nft().GetSetElements(t.named(names[0]))
		if err != nil {
			return err
		}
		var keys, sources []nftables.SetElement
		for _, e := range have {
			f, ok := decodeFlow(e.Key)
			to, ok2 := decodeEnd(e.Val)
			if !ok || !ok2 || !slices.Contains(gone, f) {
				continue
			}
			keys = append(keys, nftables.SetElement{Key: e.Key})
			source := flow{f.from, to}
			sources = append(sources, nftables.SetElement{Key: source.key()})
		}
		if len(keys) == 0 {
			continue
		}
		there, err := t.nft.Nft().GetSetElements(t.named(names[1]))
		if err != nil {
			return err
		}
		if err := t.nft.Nft().SetDeleteElements(t.named(names[0]), keys); err != nil {
			return err
		}
		if sources = both(sources, there); len(sources) > 0 {
			if err := t.nft.Nft().SetDeleteElements(t.named(names[1]), sources); err != nil {
				return err
			}
		}
	}
	err := t.flush()
	if errors.Is(err, os.ErrNotExist) {
		return nil // it ran out meanwhile
	}
	return err
}

// both keeps of a what is in b.
func both(a, b []nftables.SetElement) []nftables.SetElement {
	have := map[string]bool{}
	for _, e := range b {
		have[string(e.Key)] = true
	}
	return slices.DeleteFunc(a, func(e nftables.SetElement) bool { return !have[string(e.Key)] })
}

// Used tells whether the kernel has forwarded packets of the mapping lately: as long as it remembers one of its flows.
func (t *Table) Used(m Mapping) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range flows(m) {
		entry, there, err := t.ct.Get(f.tuple())
		if err != nil {
			return false, fmt.Errorf("looking for the flow from %s to %s in the connection table: %w", f.from, f.to, err)
		}
		if there && entry.Status&(conntrack.SrcNAT|conntrack.DstNAT) != 0 {
			return true, nil
		}
	}
	return false, nil
}

// Ready is nil when this host forwards packets of the family.
func (t *Table) Ready(ipv6 bool) error {
	name := "net/ipv4/ip_forward"
	if ipv6 {
		name = "net/ipv6/conf/all/forwarding"
	}
	b, err := os.ReadFile(t.proc + "/" + name)
	if err != nil {
		return fmt.Errorf("reading whether this host forwards packets: %w", err)
	}
	if strings.TrimSpace(string(b)) == "0" {
		return fmt.Errorf("%s is 0, so this host's kernel forwards nothing: set it to 1 to relay in the kernel",
			strings.ReplaceAll(name, "/", "."))
	}
	return nil
}

// Purge deletes the table, and takes its flows out of the connection table. What is not there is no error.
func Purge(c Config) error {
	conn, err := nftable.Open(c.NetNS)
	if err != nil {
		return err
	}
	defer conn.Close()
	t := &Table{nft: conn, numbers: c.Numbers.Filled(), stale: map[flow]time.Time{}}
	left := t.left()
	if there, err := conn.Delete(t.numbers.RelayNftTable); err != nil || !there {
		return err
	}
	ct, err := conntrack.Open(c.NetNS)
	if err != nil {
		return err
	}
	return errors.Join(forget(ct, left), ct.Close())
}

func flows(m Mapping) []flow {
	if m.zero() {
		return nil
	}
	return []flow{{m.ARemote, m.ALocal}, {m.BRemote, m.BLocal}}
}

func (f flow) tuple() conntrack.Tuple {
	return conntrack.Tuple{Proto: unix.IPPROTO_UDP, Src: f.from.Addr(), Dst: f.to.Addr(), SrcPort: f.from.Port(),
		DstPort: f.to.Port()}
}

// forget deletes flows from the connection table, wherever they are translated to. What is not there is no error.
func forget(ct *conntrack.Conn, flows []flow) error {
	keys := make([]conntrack.Key, len(flows))
	for i, f := range flows {
		keys[i].Tuple = f.tuple()
	}
	refused, err := ct.Delete(keys)
	for i, f := range flows {
		if errno := refused[i]; errno != 0 && errno != unix.ENOENT {
			err = errors.Join(err, fmt.Errorf("deleting the flow from %s to %s from the connection table: %w", f.from, f.to,
				errno))
		}
	}
	return err
}
