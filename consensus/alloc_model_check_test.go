package consensus

import (
	"math"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/skeinmesh/skein/events"
)

// step is something that a client asked, and what it was told.
type step struct {
	ask ask
	got got
}

func set(n ...int) (b blocks) {
	for _, i := range n {
		b = b.with(i)
	}
	return b
}

func get(node, total int, given ...int) step {
	return step{ask{do: allocate, node: node, amount: total, at: 1}, got{blocks: set(given...)}}
}

func give(node int, n ...int) step {
	return step{ask{do: release, node: node, blocks: set(n...), at: 2}, got{}}
}

func no(a ask, code events.Code) step { return step{a, got{refused: code}} }

// judge lets Porcupine check steps that come one after the other.
func judge(t *testing.T, name string, m porcupine.Model, steps []step, right bool) {
	t.Helper()
	var ops []porcupine.Operation
	for i, s := range steps {
		op := porcupine.Operation{Input: s.ask, Call: int64(2 * i), Output: s.got, Return: int64(2*i + 1)}
		if s.got.unknown {
			op.Return = math.MaxInt64
		}
		ops = append(ops, op)
	}
	want := map[bool]porcupine.CheckResult{true: porcupine.Ok, false: porcupine.Illegal}[right]
	if got := porcupine.CheckOperationsTimeout(m, ops, 10*time.Second); got != want {
		t.Errorf("%s: %s, want %s", name, got, want)
	}
}

// The model takes what may be, and refuses what may not: else a green check would say nothing.
func TestModelTellsRightFromWrong(t *testing.T) {
	tiny := poolSpec{name: "tiny", size: 2, extended: 3}
	cold := poolSpec{name: "cold", size: 2, extended: 2, cooldown: 10}
	limited := poolSpec{name: "limited", size: 4, extended: 4, most: 1}
	with := func(s step, at int64) step { s.ask.at = at; return s }
	pools := map[string]struct {
		pool  poolSpec
		steps []step
		right bool
	}{
		"by number":                 {tiny, []step{get(1, 1, 0), get(2, 1, 1)}, true},
		"a block to two nodes":      {tiny, []step{get(1, 1, 0), get(2, 1, 0)}, false},
		"not the first":             {tiny, []step{get(1, 1, 1)}, false},
		"asked twice, given once":   {tiny, []step{get(1, 1, 0), get(1, 1)}, true},
		"asked twice, given twice":  {tiny, []step{get(1, 1, 0), get(1, 1, 1)}, false},
		"the block just returned":   {tiny, []step{get(1, 1, 0), give(1, 0), get(1, 1, 0)}, false},
		"another while one is free": {tiny, []step{get(1, 1, 0), give(1, 0), get(1, 1, 1)}, true},
		"free for longer":           {tiny, []step{get(1, 2, 0, 1), give(1, 1), give(1, 0), get(2, 1, 1)}, true},
		"free for shorter":          {tiny, []step{get(1, 2, 0, 1), give(1, 1), give(1, 0), get(2, 1, 0)}, false},
		"released by another":       {tiny, []step{get(1, 1, 0), give(2, 0)}, false},
		"released by another and refused": {tiny, []step{get(1, 1, 0), no(give(2, 0).ask, events.FailedPrecondition),
			get(2, 1, 1)}, true},
		"refused while there is some": {tiny, []step{no(get(1, 1).ask, events.ResourceExhausted)}, false},
		"refused when there is none":  {tiny, []step{get(1, 2, 0, 1), no(get(2, 1).ask, events.ResourceExhausted)}, true},
		"draining and given":          {tiny, []step{{ask{do: drain}, got{}}, get(1, 1, 0)}, false},
		"draining and refused": {tiny, []step{{ask{do: drain}, got{}},
			no(get(1, 1).ask, events.FailedPrecondition)}, true},
		"given to a revoked node": {tiny, []step{{ask{do: revoke, node: 1}, got{}}, get(1, 1, 0)}, false},
		"what a revoked node had": {tiny, []step{get(1, 2, 0, 1), {ask{do: revoke, node: 1}, got{}},
			get(2, 2, 0, 1)}, true},
		"not extended": {tiny, []step{get(1, 3, 0, 1, 2)}, false},
		"extended":     {tiny, []step{{ask{do: extend}, got{}}, get(1, 3, 0, 1, 2)}, true},
		"reserved and given": {tiny, []step{{ask{do: reserve, blocks: set(0)}, got{blocks: set(0)}},
			get(1, 1, 0)}, false},
		"around the reserved": {tiny, []step{{ask{do: reserve, blocks: set(0)}, got{blocks: set(0)}},
			get(1, 1, 1)}, true},
		"within its cooldown":        {cold, []step{get(1, 2, 0, 1), give(1, 0), with(get(2, 1, 0), 11)}, false},
		"after its cooldown":         {cold, []step{get(1, 2, 0, 1), give(1, 0), with(get(2, 1, 0), 12)}, true},
		"beyond the limit of a node": {limited, []step{get(1, 2, 0, 1)}, false},
		"up to the limit of a node":  {limited, []step{get(1, 2, 0)}, true},
		"lost before it was done":    {tiny, []step{{get(1, 1).ask, got{unknown: true}}, get(2, 1, 0)}, true},
		"lost after it was done":     {tiny, []step{{get(1, 1).ask, got{unknown: true}}, get(2, 1, 1)}, true},
		"lost, done and given to another": {tiny, []step{{get(1, 1).ask, got{unknown: true}}, get(2, 1, 1),
			get(3, 1, 0)}, false},
		"seen as it is": {tiny,
			[]step{get(1, 1, 0), {ask{do: look}, got{seen: poolState{size: 2, owner: [modelBlocks]int8{1}}}}}, true},
		"seen with another": {tiny,
			[]step{get(1, 1, 0), {ask{do: look}, got{seen: poolState{size: 2, owner: [modelBlocks]int8{2}}}}}, false},
	}
	for name, c := range pools {
		judge(t, name, c.pool.model(), c.steps, c.right)
	}
}

func TestModelsOfAddressesAndGrants(t *testing.T) {
	have := func(node int) step { return step{ask{do: claim, node: node}, got{}} }
	leave := func(node int) step { return step{ask{do: giveUp, node: node}, got{}} }
	judge(t, "two holders", claimModel(), []step{have(1), have(2)}, false)
	judge(t, "one after the other", claimModel(), []step{have(1), leave(1), have(2)}, true)
	judge(t, "given up by another", claimModel(), []step{have(1), leave(2), have(2)}, false)
	judge(t, "refused though nobody has it", claimModel(), []step{no(have(1).ask, events.FailedPrecondition)}, false)
	may := func(node, n int) step { return step{ask{do: grant, node: node, amount: n}, got{}} }
	judge(t, "the whole quota", grantModel(5), []step{may(1, 3), may(2, 2), may(1, 0), may(2, 5)}, true)
	judge(t, "more than the quota", grantModel(5), []step{may(1, 3), may(2, 3)}, false)
	judge(t, "refused within the quota", grantModel(5), []step{may(1, 3), no(may(2, 2).ask, events.ResourceExhausted)},
		false)
}

// The network of the tests does what its faults say.
func TestNetworkLosesOneWayAndDelays(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		a, b := c.add("a", false), c.add("b", false)
		l := c.net.listen(b.id, "test")
		defer l.Close()
		c.net.delay(ids(a), ids(b), time.Second)
		here, err := dialer{c.net, a.id}.Dial(t.Context(), b.id, "test")
		if err != nil {
			t.Fatal(err)
		}
		there, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer here.Close()
		defer there.Close()
		buf, began := make([]byte, 16), time.Now()
		for i := range 200 {
			if _, err := here.Write([]byte{byte(i)}); err != nil {
				t.Fatal(err)
			}
		}
		for i := 0; i < 200; {
			n, err := there.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range buf[:n] {
				if v != byte(i) {
					t.Fatalf("%d came as %d", v, i)
				}
				i++
			}
		}
		if took := time.Since(began); took < 500*time.Millisecond || took > time.Second {
			t.Errorf("200 writes that take up to a second each arrived after %s", took)
		}
		c.net.cutWay(ids(a), ids(b))
		heard := func(from, to interface {
			Write([]byte) (int, error)
			Read([]byte) (int, error)
			SetReadDeadline(time.Time) error
		}) bool {
			_ = to.SetReadDeadline(time.Now().Add(2 * time.Second))
			if _, err := from.Write([]byte{1}); err != nil {
				t.Fatal(err)
			}
			_, err := to.Read(buf)
			return err == nil
		}
		if heard(here, there) || !heard(there, here) {
			t.Error("the way that was cut is open, or the other is not")
		}
	})
}
