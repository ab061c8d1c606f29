package consensus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

const year = 365 * 24 * time.Hour

func TestPace(t *testing.T) {
	at := time.Now()
	base := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).UnixNano()
	for _, c := range []struct {
		name   string
		slack  time.Duration
		passed time.Duration // since the log said base
		clock  time.Duration // beyond base
		newest time.Duration // the last event, beyond base
		v      verdict
		want   time.Duration
	}{
		{"a clock that is right", clockBound, time.Minute, time.Minute, time.Minute, unjudged, time.Minute},
		{"a little ahead", clockBound, time.Minute, 90 * time.Second, 0, unjudged, 90 * time.Second},
		{"far ahead", clockBound, time.Minute, year, 0, unjudged, 2*time.Minute + clockBound},
		{"far ahead, and the others too", clockBound, time.Minute, year, 0, confirmed, year},
		{"days after a restart", clockRestart, 0, 48 * time.Hour, 0, unjudged, 48 * time.Hour},
		{"a month after a restart", clockRestart, 0, 30 * 24 * time.Hour, 0, unjudged, clockRestart},
		{"a clock that is behind", clockBound, time.Minute, 40 * time.Second, 0, unjudged, 40 * time.Second},
		{"a log that is ahead", clockBound, time.Minute, -20 * year, 0, unjudged, 30 * time.Second},
		{"a log that is ahead of them all", clockBound, time.Minute, -20 * year, 0, confirmed, 30 * time.Second},
		{"never backwards", clockBound, time.Minute, 40 * time.Second, 50 * time.Second, unjudged, 50 * time.Second},
		{"nor when it is ahead of its bounds", clockBound, 0, year, year / 2, unjudged, year / 2},
		{"no time has passed", clockBound, 0, 0, 0, unjudged, 0},
		{"the monotonic clock of another process", clockBound, -time.Hour, 0, 0, unjudged, 0},
	} {
		got := pace{base, at, c.slack}.next(base+int64(c.newest), base+int64(c.clock), c.v, at.Add(c.passed))
		if d := time.Duration(got - base); d != c.want {
			t.Errorf("%s: %s beyond the base, want %s", c.name, d, c.want)
		}
	}
	if got := (pace{0, at, clockBound}).next(0, base, unjudged, at); got != base {
		t.Errorf("the first event of all is at %d", got)
	}
	const end = 1<<63 - 1
	if got := (pace{end - 5, at, clockBound}).next(end-5, base, unjudged, at.Add(time.Hour)); got < end-5 {
		t.Errorf("at the end of time: %d", got)
	}
}

func TestClocksJudgeEachOther(t *testing.T) {
	s := func(d ...int64) (out []int64) {
		for _, v := range d {
			out = append(out, v*int64(time.Second))
		}
		return out
	}
	for name, c := range map[string]struct {
		others []int64
		want   verdict
	}{
		"alone":                                {nil, unjudged},
		"one that agrees":                      {s(3), confirmed},
		"one that does not":                    {s(4000), unjudged},
		"two that are ahead":                   {s(4000, 4001), wrong},
		"two that are ahead, far apart":        {s(4000, 9000), wrong},
		"two that are behind":                  {s(-4000, -4001), wrong},
		"between two":                          {s(-4000, 4000), unjudged},
		"one of two agrees":                    {s(1, 4000), confirmed},
		"one of four agrees":                   {s(1, 4000, 4000, 4000), wrong},
		"two of four agree":                    {s(1, -1, 4000, -4000), confirmed},
		"two and two":                          {s(1, 4000, 4000), unjudged},
		"at the bound":                         {s(45, 45), confirmed},
		"four of five that are all over place": {s(-9000, -4000, 4000, 9000), unjudged},
	} {
		if got := judgeClock(0, c.others); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	now := time.Now()
	var k clocks
	servers := []raft.Server{{ID: "a"}, {ID: "b"}, {ID: "c"}, {ID: "n", Suffrage: raft.Nonvoter}}
	k.note("b", 100, now.Add(-2*time.Second), now)
	k.note("c", 100, now.Add(-clockStale-2*time.Second), now.Add(-clockStale-time.Second))
	k.note("n", 100, now, now)
	k.note("a", 100, now, now)
	if got := k.now("a", servers, now); len(got) != 1 || got["b"] != 100+int64(time.Second) {
		t.Errorf("the other voters' clocks are %v", got)
	}
	k.note("b", 0, now, now) // an earlier version
	if got := k.now("a", servers, now); got["b"] != 100+int64(time.Second) {
		t.Errorf("no answer replaced one: %v", got)
	}
	if id, ok := levelVoter(0, map[raft.ServerID]int64{"b": int64(time.Hour), "c": int64(time.Hour) + 1}); !ok ||
		id != "b" {
		t.Errorf("to hand over to: %q", id)
	}
	if id, ok := levelVoter(0, map[raft.ServerID]int64{"b": int64(time.Hour), "c": int64(3 * time.Hour)}); ok {
		t.Errorf("nobody is level, and %q gets leadership", id)
	}
}

// skewed gives each server a clock that the test sets.
func (c *cluster) skewed() (ahead func(*node) *atomic.Int64) {
	var clocks [16]atomic.Int64
	at := func(n *node) *atomic.Int64 {
		for i, o := range c.nodes {
			if o == n {
				return &clocks[i]
			}
		}
		return nil
	}
	c.tune = func(cfg *ServerConfig) {
		for _, n := range c.nodes {
			if n.id == cfg.ID {
				clock := at(n)
				cfg.Now = func() time.Time { return time.Now().Add(time.Duration(clock.Load())) }
			}
		}
	}
	return at
}

// timeOff is how far the log's time is off.
func (n *node) timeOff() time.Duration { return time.Until(time.Unix(0, n.replica.State().Time())) }

// A leader whose clock is once far ahead, with nobody to compare: what is decided then is a little early, and what
// expires after it does.
func TestOneJumpAheadIsNotForEver(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		ahead := c.skewed()
		c.form(1)
		s := c.nodes[0]
		c.propose(s, &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
			Name: "default", BlockSizeBits: 3, CooldownSeconds: 30, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/29"}}}}}})
		id := s.id.String()
		ahead(s).Store(int64(20 * year))
		for i := range 100 {
			c.propose(s, token(i))
		}
		if off := s.timeOff(); off > clockBound+time.Second {
			t.Errorf("after 100 commands with that clock the log's time is %s ahead", off)
		}
		ahead(s).Store(0)
		c.propose(s, token(1000))
		c.propose(s, &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
			NodeId: id, Pool: "default", Total: 1}}})
		c.propose(s, releaseCommand("default", id, blocks(1)))
		time.Sleep(2 * time.Hour) // virtual
		late := c.add("late", false)
		_, err := s.client.Propose(within(t, 10*time.Second),
			&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
				Node: late.newNode(), TokenId: tokenID(1000), TokenSecretHash: token(1000).GetCreateToken().GetSecretHash(),
				ClusterId: testCluster}}})
		if events.CodeOf(err) != events.PermissionDenied || !strings.Contains(err.Error(), "expired at") {
			t.Errorf("a token for an hour, two hours later: %v", err)
		}
		a := c.propose(s,
			&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: id,
				Pool: "default", Total: 1}}})
		if len(a.GetBlocks()) != 1 {
			t.Errorf("a block that rests for 30 s, two hours later: %v", a)
		}
		if off := s.timeOff(); off.Abs() > time.Second {
			t.Errorf("the log's time is still off by %s", off)
		}
	})
}

// A log that is years ahead, as one wrong clock made it in earlier versions: time goes on in it, and a repair sets it
// right, also over a restart.
func TestRepairOfTheLogsTime(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		ahead := c.skewed()
		first := c.add("s1", true)
		ahead(first).Store(int64(20 * year))
		first.start(true)
		c.create(first)
		c.propose(first, token(1))
		first.close()
		ahead(first).Store(0)
		first.start(false)
		c.leader()
		before := first.timeOff()
		time.Sleep(4 * time.Hour) // virtual
		c.propose(first, token(2))
		if went := first.timeOff() + 4*time.Hour - before; went < time.Hour+59*time.Minute {
			t.Errorf("in four hours the log's time went on by %s", went)
		}
		c.propose(first, &skeinv1.Command{Body: &skeinv1.Command_RepairClock{RepairClock: &skeinv1.RepairClock{}}})
		c.propose(first, token(3))
		if off := first.timeOff(); off.Abs() > time.Second {
			t.Errorf("after the repair the log's time is off by %s", off)
		}
		first.close()
		first.start(false)
		c.leader()
		c.propose(first, token(4))
		if off := first.timeOff(); off.Abs() > time.Second {
			t.Errorf("after a restart the log's time is off by %s", off)
		}
		for _, v := range first.replica.State().Tokens() {
			if left := time.Until(time.Unix(0, v.GetExpiresAt())); left > time.Hour {
				t.Errorf("token %s expires in %s", v.GetId(), left)
			}
		}
	})
}

// A leader whose clock two others contradict decides nothing, and one of them leads soon.
func TestLeaderWithAWrongClockHandsOver(t *testing.T) {
	for _, off := range []time.Duration{20 * year, time.Hour, -time.Hour} {
		simulate(t, func(t *testing.T, c *cluster) {
			ahead := c.skewed()
			c.form(3)
			time.Sleep(2 * clockAsk) // virtual: they have looked at each other's clocks
			old := c.leader()
			ahead(old).Store(int64(off))
			c.propose(old, token(1))
			if !slices.ContainsFunc(c.nodes, func(n *node) bool { return n != old && n.raft != nil && n.raft.IsLeader() }) {
				t.Errorf("off by %s: it has decided, since no other server leads", off)
			}
			// The next one may lead, and have decided, before the old one has heard of it.
			c.eventually(fmt.Sprintf("off by %s: it leads no more", off), func() error {
				if c.leader() == old {
					return errors.New("it still leads")
				}
				return nil
			})
			c.agree()
			if got := old.timeOff(); got.Abs() > time.Second {
				t.Errorf("off by %s: the log's time is off by %s", off, got)
			}
			ahead(old).Store(0)
			c.eventually("its clock is confirmed again", func() error {
				if v := old.raft.clockVerdict(); v != confirmed {
					return fmt.Errorf("it is %s", v)
				}
				return nil
			})
		})
	}
}

// All clocks are set by years at once, as after a wrong start: a majority agrees, and the log follows.
func TestClocksThatAgreeAreFollowed(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		ahead := c.skewed()
		c.form(3)
		for _, n := range c.nodes {
			ahead(n).Store(int64(year))
		}
		time.Sleep(2 * clockAsk) // virtual
		c.propose(c.nodes[0], token(1))
		if off := c.leader().timeOff(); off < year-time.Minute {
			t.Errorf("the log's time is %s ahead, the clocks a year", off)
		}
	})
}

// With two voters nobody can tell which clock is right: the leader decides, within bounds.
func TestTwoClocksThatDiffer(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		ahead := c.skewed()
		c.form(2)
		time.Sleep(2 * clockAsk) // virtual
		ahead(c.leader()).Store(int64(year))
		time.Sleep(2 * clockAsk)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := c.leader().client.Propose(ctx, token(1)); err != nil {
			t.Error(err)
		}
		if off := c.leader().timeOff(); off > 2*clockBound+time.Minute {
			t.Errorf("the log's time is %s ahead", off)
		}
	})
}
