package consensus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// follower is a node of a site without a disk: it takes what a leader passes on as a real one does, and keeps the state
// in memory.
type follower struct {
	node    *node
	leader  *node
	state   *events.State
	waiting unproven
	at      atomic.Uint64
	when    atomic.Int64 // it came to at, Unix ns
	failed  atomic.Pointer[error]
}

func (f *follower) run(ctx context.Context) {
	stream, err := f.node.conns.passer(f.leader.id).Subscribe(ctx, &skeinv1.SubscribeRequest{After: f.state.Index(),
		Checkpoints: true})
	for err == nil && stream.Receive() {
		var news *skeinv1.Batch
		var point *skeinv1.Checkpoint
		if news, point, err = f.waiting.add(stream.Msg(), f.state); err != nil || news == nil {
			continue
		}
		next := f.state.Clone()
		for _, e := range news.GetEvents() {
			if err = next.Fold(e); err != nil {
				break
			}
		}
		if err == nil && next.Hash() != [32]byte(point.GetHash()) {
			err = errForged
		}
		if err == nil {
			f.state = next
			f.when.Store(time.Now().UnixNano())
			f.at.Store(next.Index())
		}
	}
	if err == nil {
		err = stream.Err()
	}
	if ctx.Err() == nil {
		f.failed.Store(&err)
	}
}

// In many sites every node has folded a commit soon, and a server sends it to leaders alone. Servers and leaders are
// whole, the other nodes have no disk. SKEIN_FANOUT is how many nodes there are, in 50 sites: 10,000 take a minute or
// two of processor time and 5 GiB.
func TestCommitReachesAllSites(t *testing.T) {
	const servers, perSite, commits = 5, 2, 10
	places, total := 10, 200
	if n, err := strconv.Atoi(os.Getenv("SKEIN_FANOUT")); err == nil {
		places, total = 50, n
	}
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(servers)
		all := make([]*site, places)
		for i := range all {
			all[i] = &site{}
		}
		// Most nodes are members that run nothing of their own.
		var followers []*follower
		for i := range total - servers - places*perSite {
			n := c.diskless(fmt.Sprint("node", i))
			n.conns = NewConns(dialer{c.net, n.id})
			all[i%places].members = append(all[i%places].members, n)
			followers = append(followers, &follower{node: n})
		}
		for i, s := range all {
			for j := range perSite {
				n := c.add(fmt.Sprintf("lead%d-%d", i, j), false)
				n.site = s
				s.members = append(s.members, n)
			}
		}
		c.admitAll(all)
		for _, s := range all {
			for _, n := range s.members[len(s.members)-perSite:] {
				n.startWith(c.leader().replica.State())
			}
		}
		c.agree()
		for _, s := range all {
			s.lead(s.members[len(s.members)-perSite:]...) // each then chooses a server
		}
		c.eventually("all leaders can pass events on", func() error {
			for _, s := range all {
				for _, n := range s.leading {
					if p, _ := n.client.Proof(); p == nil {
						return errors.New(n.name + " cannot")
					}
				}
			}
			return nil
		})
		for i, f := range followers {
			f.leader = all[i%places].leading[i/places%perSite]
		}
		for i, s := range all { // tens of milliseconds between places
			for _, n := range s.leading {
				c.net.delay(ids(c.nodes[:servers]...), ids(n), time.Duration(20+i)*time.Millisecond)
				c.net.delay(ids(n), ids(c.nodes[:servers]...), time.Duration(20+i)*time.Millisecond)
			}
		}
		ctx, stop := context.WithCancel(context.Background())
		var running sync.WaitGroup
		for _, f := range followers {
			c.net.delay(ids(f.leader), ids(f.node), 5*time.Millisecond)
			f.state = f.leader.replica.State()
			f.waiting.base = f.state.Index()
			running.Go(func() { f.run(ctx) })
		}
		defer func() {
			stop()
			running.Wait()
			for _, f := range followers {
				f.node.conns.Close()
			}
		}()
		c.eventually("all nodes are served", func() error {
			n := 0
			for _, s := range all {
				for _, l := range s.leading {
					n += l.service.Passing()
				}
			}
			if n != len(followers) {
				return fmt.Errorf("%d of %d", n, len(followers))
			}
			return nil
		})
		var took []time.Duration // of each commit, to each node
		for i := range commits {
			began := time.Now()
			index := c.propose(c.leader(), token(i)).GetIndex()
			c.eventually("everybody has folded it", func() error {
				for _, f := range followers {
					if err := f.failed.Load(); err != nil {
						t.Fatalf("%s: %v", f.node.name, *err)
					}
					if f.at.Load() < index {
						return errors.New("not yet")
					}
				}
				return nil
			})
			for _, f := range followers {
				took = append(took, time.Unix(0, f.when.Load()).Sub(began))
			}
		}
		slices.Sort(took)
		slowest := took[len(took)-1]
		var most, sum int64
		for _, n := range c.nodes[:servers] {
			streams := n.service.subscribers.Load()
			most, sum = max(most, streams), sum+streams
		}
		t.Logf("%d nodes in %d sites: a commit was folded within p50 %s, p99 %s, by all within %s; %d servers sent it %d "+
			"times, one of them %d times",
			len(followers)+places*perSite+servers, places, took[len(took)/2], took[len(took)*99/100], slowest,
			servers, sum, most)
		if slowest > 2*time.Second {
			t.Errorf("a commit took %s to all, want 2s at most", slowest)
		}
		if sum != int64(places*perSite) || most > 50 {
			t.Errorf("servers sent a commit %d times, one of them %d times; want %d, and 50 at most", sum, most, places*perSite)
		}
	})
}

// admitAll admits the members of sites by one token, many at a time.
func (c *cluster) admitAll(sites []*site) {
	c.t.Helper()
	secret := make([]byte, 32)
	secret[0] = 77
	const id = "00000000000000ff"
	allow := tokenCommand(id, secret)
	for _, s := range sites {
		allow.GetCreateToken().Uses += uint32(len(s.members))
	}
	leader := c.leader()
	c.propose(leader, allow)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, s := range sites {
		var answers sync.WaitGroup
		failures := make([]error, len(s.members))
		for i, n := range s.members {
			cmd := &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
				Node: n.newNode(), TokenId: id, TokenSecretHash: secret, ClusterId: testCluster}}}
			answers.Go(func() { _, failures[i] = leader.client.Propose(ctx, cmd) })
		}
		answers.Wait()
		if err := errors.Join(failures...); err != nil {
			c.t.Fatalf("admit the members of a site: %v", err)
		}
	}
}
