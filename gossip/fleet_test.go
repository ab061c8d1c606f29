package gossip

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// sharedRoster is a roster whose keys all nodes share.
type sharedRoster map[identity.ID]ed25519.PublicKey

func (r sharedRoster) Key(id identity.ID) (ed25519.PublicKey, bool) { k, ok := r[id]; return k, ok }
func (r sharedRoster) Keys() map[identity.ID]ed25519.PublicKey      { return r }
func (r sharedRoster) Members() (ids []identity.ID) {
	for id := range r {
		ids = append(ids, id)
	}
	return ids
}

// interned are the records that all nodes share.
type interned struct{ m sync.Map }

func (i *interned) share(e Entry) Entry {
	h := sha256.New()
	h.Write(e.Signed.GetRecord())
	h.Write(e.Signed.GetSignature())
	if known, ok := i.m.LoadOrStore([32]byte(h.Sum(nil)), e); ok {
		at := e.ReceivedAt
		e = known.(Entry)
		e.ReceivedAt = at
	}
	return e
}

// formed: in each site all nodes see each other, the wide nodes see each other, and all hold the same records.
func (s *sited) formedPools() bool {
	hash := s.nodes[0].g.Hash()
	for i, n := range s.nodes {
		if near := n.g.near.Load(); near.alive.count() < s.per-1 {
			return false
		}
		if wide := n.g.wide.Load(); wide != nil && wide.alive.count() < s.sites*s.wides-1 {
			return false
		}
		if n.g.Hash() != hash || n.g.Held().SiteHash != s.nodes[i/s.per*s.per].g.Held().SiteHash {
			return false
		}
	}
	return s.nodes[0].g.Held().Mesh == s.sites*s.wides
}

// A change of a local node reaches its site within a second, however many other sites there are. SKEIN_SITES is how
// many nodes there are, in 50 sites.
func TestOwnSiteHasAChangeAtOnce(t *testing.T) {
	const wides = 4
	places, total := 10, 200
	rounds := 5
	if testing.Short() {
		places, total = 5, 60
	}
	if n, err := strconv.Atoi(os.Getenv("SKEIN_SITES")); err == nil {
		places, total, rounds = 50, n, 4
		defer debug.SetGCPercent(debug.SetGCPercent(150))
	}
	began := time.Now()
	simtime.Test(t, func(t *testing.T) {
		per := total / places
		roster, known := sharedRoster{}, &interned{}
		s := &sited{sim: &sim{t: t, net: newSimNet(7), roster: newRoster()}, sites: places, per: per, wides: wides}
		s.net.loss, s.net.inbox = 0.02, 256
		s.homes = map[identity.ID]string{}
		for i := range total {
			k := simKey(i)
			roster[k.ID()] = k.Public()
			s.homes[k.ID()] = siteName(i / per)
		}
		began := time.Now()
		for i := range total {
			s.begin(i, Config{Roster: roster, share: known.share})
		}
		defer s.end()
		for !s.formedPools() {
			if time.Since(began) > 5*time.Minute {
				s.explain()
				t.Fatal("the pools have not formed")
			}
			time.Sleep(time.Second)
		}
		t.Logf("%d nodes in %d sites formed in %s", total, places, time.Since(began))
		time.Sleep(5 * time.Second)
		var times []time.Duration
		for round := range rounds {
			version := fmt.Sprint("round", round)
			var waiting []int // local nodes, one of each site
			for site := range places {
				i := site*per + wides + (round*7+site)%(per-wides)
				waiting = append(waiting, i)
				s.say(i, version)
			}
			at := time.Now()
			for len(waiting) > 0 && time.Since(at) < 10*time.Second {
				waiting = slices.DeleteFunc(waiting, func(i int) bool {
					if !heard(s.of(i/per), simKey(i).ID(), version)() {
						return false
					}
					times = append(times, time.Since(at))
					return true
				})
				time.Sleep(10 * time.Millisecond)
			}
			if len(waiting) > 0 {
				t.Errorf("%d sites lack a change after %s", len(waiting), time.Since(at))
			}
			time.Sleep(2 * time.Second)
		}
		slices.Sort(times)
		p99 := times[(len(times)-1)*99/100]
		t.Logf("%d changes: p50 %s p99 %s max %s", len(times), times[len(times)/2], p99, times[len(times)-1])
		if p99 > time.Second {
			t.Errorf("p99 %s, want at most 1s", p99)
		}
		time.Sleep(20 * time.Second)
		const rest = 20 * time.Second
		var before, after [2]int64 // of local and of wide nodes
		count := func(to *[2]int64) {
			for i, n := range s.nodes {
				if i%per < wides {
					to[1] += n.bytes.Load()
				} else {
					to[0] += n.bytes.Load()
				}
			}
		}
		count(&before)
		time.Sleep(rest)
		count(&after)
		for kind, n := range []int{places * (per - wides), places * wides} {
			t.Logf("at rest a %s node sends %.0f bytes/s", []string{"local", "wide"}[kind],
				float64(after[kind]-before[kind])/rest.Seconds()/float64(n))
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		t.Logf("%d KiB of heap and %d KiB of stacks for each node", m.HeapAlloc/uint64(total)>>10,
			m.StackInuse/uint64(total)>>10)
	})
	t.Logf("took %s", time.Since(began).Round(time.Second))
}
