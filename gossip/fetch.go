package gossip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const (
	// fetchKept is how long fetched records are returned again without another request.
	fetchKept = 10 * time.Second
	// maxFetched bounds the sites whose records are kept.
	maxFetched = 64
	// fetchesAtOnce is how many sites one call asks at the same time.
	fetchesAtOnce = 4
	// fetchTries is how many nodes of a site are asked at most.
	fetchTries = 3
	// Requests a second that a node answers for its site's records: of one member, and of all members together.
	askerPerSecond, askerBurst       = 0.5, 8
	allAskersPerSecond, allAskersMax = 10, 50
	maxAskers                        = 1024
)

var (
	errNobodySpeaks = errors.New("no live node of that site is known here; ask on a node of that site")
	errAskedTooMuch = errors.New("asked for this site's records too often")
)

// fetches holds what both sides of Fetch remember.
type fetches struct {
	mu     sync.Mutex
	kept   map[string]*fetched
	askers map[identity.ID]*rate.Limiter
	all    *rate.Limiter
}

// fetched holds one site's records; its lock is held while they are fetched.
type fetched struct {
	mu      sync.Mutex
	at      time.Time
	entries map[identity.ID]Entry
}

// Fetch returns the records of other sites' local nodes, those of each site from one of its wide nodes. They are kept
// for fetchKept and are not in Records. The error names the sites that could not be asked; the records of the others
// are returned with it.
func (g *Gossip) Fetch(ctx context.Context, sites []string) (map[identity.ID]Entry, error) {
	found := make(map[identity.ID]Entry)
	var mu sync.Mutex
	var errs []error
	var asking sync.WaitGroup
	slots := make(chan struct{}, fetchesAtOnce)
	sites = slices.Clone(sites)
	slices.Sort(sites)
	for _, site := range slices.Compact(sites) {
		if place := g.place.Load(); place.Sited && site == place.Site {
			for id, e := range g.local.entries() {
				mu.Lock()
				found[id] = e
				mu.Unlock()
			}
			continue
		}
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			entries, err := g.fetchSite(ctx, site)
			mu.Lock()
			defer mu.Unlock()
			for id, e := range entries {
				if old, ok := found[id]; !ok || later(e.Record, old.Record) {
					found[id] = e
				}
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("fetch the records of site %q: %w", site, err))
			}
		})
	}
	asking.Wait()
	return found, errors.Join(errs...)
}

// later reports whether r has the higher number.
func later(r, than *skeinv1.Record) bool {
	return than == nil || cmp.Or(cmp.Compare(r.GetEpoch(), than.GetEpoch()), cmp.Compare(r.GetSeq(), than.GetSeq())) > 0
}

func (g *Gossip) fetchSite(ctx context.Context, site string) (map[identity.ID]Entry, error) {
	f := g.fetches.of(site)
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.at.IsZero() && time.Since(f.at) < fetchKept {
		return f.entries, nil
	}
	err := errNobodySpeaks
	for _, id := range g.whomToAsk(site) {
		var entries map[identity.ID]Entry
		if entries, err = g.fetchFrom(ctx, id, site); err == nil {
			f.entries, f.at = entries, time.Now()
			return entries, nil
		}
		g.stats.add(&g.stats.PullErrors)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// whomToAsk returns live nodes that speak for a site: leaders first, and among these the ones that the log has chosen.
func (g *Gossip) whomToAsk(site string) (ids []identity.ID) {
	voices, place := slices.Clone(g.table.speaking()[site]), g.place.Load()
	rand.Shuffle(len(voices), func(i, j int) { voices[i], voices[j] = voices[j], voices[i] })
	slices.SortStableFunc(voices, func(a, b voice) int {
		return place.weight(b) - place.weight(a)
	})
	for _, v := range voices {
		if v.id != g.cfg.Self && len(ids) < fetchTries && g.Alive(v.id) {
			ids = append(ids, v.id)
		}
	}
	return ids
}

func (g *Gossip) fetchFrom(ctx context.Context, id identity.ID, site string) (map[identity.ID]Entry, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(g.ctx, cancel)()
	conn, done, err := g.pull.open(ctx, id)
	if err != nil {
		return nil, err
	}
	defer done()
	records, err := g.exchange().fetch(conn)
	if err != nil {
		return nil, fmt.Errorf("node %s does not answer, or was asked too often: %w", id, err)
	}
	entries := make(map[identity.ID]Entry, len(records))
	for _, s := range records {
		r, owner, err := decodeRecord(s)
		if err != nil || tableOf(r) != siteTable || r.GetSite() != site {
			continue
		}
		m := markOf(owner, r, s)
		held, ok := g.table.get(owner)
		if ok && !m.newer(held.mark) && (Wide(held.Record) || held.Record.GetSite() != site) {
			continue
		}
		if old, ok := entries[owner]; ok && !later(r, old.Record) || g.cfg.verify(s, owner, &g.roster) != nil {
			continue
		}
		entries[owner] = Entry{Record: r, Signed: s, ReceivedAt: time.Now()}
	}
	return entries, nil
}

// of returns the entry of a site's records. If too many are kept, any other one is dropped: they last seconds only.
func (f *fetches) of(site string) *fetched {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e, ok := f.kept[site]; ok {
		return e
	}
	if f.kept == nil {
		f.kept = make(map[string]*fetched)
	}
	if len(f.kept) >= maxFetched {
		for name := range f.kept {
			delete(f.kept, name)
			break
		}
	}
	e := &fetched{}
	f.kept[site] = e
	return e
}

// may reports whether the limits allow an answer to a member now.
func (f *fetches) may(id identity.ID, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = rate.NewLimiter(allAskersPerSecond, allAskersMax)
	}
	if len(f.askers) >= maxAskers || f.askers == nil {
		f.askers = make(map[identity.ID]*rate.Limiter)
	}
	l := f.askers[id]
	if l == nil {
		l = rate.NewLimiter(askerPerSecond, askerBurst)
		f.askers[id] = l
	}
	return l.AllowN(now, 1) && f.all.AllowN(now, 1)
}

// siteRecords returns what a member of another site gets that asks for this site's records.
func (g *Gossip) siteRecords(asker identity.ID) ([]*skeinv1.SignedRecord, error) {
	if !g.place.Load().Sited {
		return nil, nil
	}
	if !g.fetches.may(asker, time.Now()) {
		g.stats.add(&g.stats.Busy)
		return nil, fmt.Errorf("node %s: %w", asker, errAskedTooMuch)
	}
	g.stats.add(&g.stats.Fetched)
	return g.local.signed(), nil
}

// fetch runs the client's end of a request for all records of a site.
func (x *exchange) fetch(conn io.ReadWriter) (all []*skeinv1.SignedRecord, err error) {
	if _, err := conn.Write([]byte{streamMagic, streamVersion}); err != nil {
		return nil, err
	}
	if err := writeFrame(conn, frameFetch, encodeDigests(x.self, nil)); err != nil {
		return nil, err
	}
	for {
		kind, payload, err := readFrame(conn)
		if err != nil {
			return nil, err
		}
		switch kind {
		case frameRecords:
			records, err := decodeRecords(payload)
			if err != nil {
				return nil, err
			}
			if all = append(all, records...); len(all) > maxDigests {
				return nil, fmt.Errorf("%w: more than %d records", errFrame, maxDigests)
			}
		case frameWant:
			return all, nil
		default:
			return nil, fmt.Errorf("%w: unexpected frame of kind %d", errFrame, kind)
		}
	}
}
