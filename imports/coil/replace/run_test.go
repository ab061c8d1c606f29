package replace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const (
	toEnd   = 10 * time.Second // of an evicted pod
	toReady = 20 * time.Second // of the next one, from its start
)

// cluster is one whose controllers start another pod for each that has ended. What happens is in its diary.
type cluster struct {
	sync.Mutex
	t        *testing.T
	pods     map[string]Pod
	watchers []chan Change
	version  int
	born     int
	diary    []string
	evict    func(Pod) error           // nil: granted
	next     func(old, next *Pod) bool // changes the pod that comes for an old one, or, with false, has none come
	kept     map[uint64]error          // blocks that the log keeps, by number
}

func newCluster(t *testing.T, pods ...Pod) *cluster {
	c := &cluster{t: t, pods: map[string]Pod{}, kept: map[uint64]error{}}
	for _, p := range pods {
		c.pods[p.UID] = p
	}
	return c
}

func (c *cluster) Pods(_ context.Context, _ func(), take func(Pod)) (string, error) {
	c.Lock()
	defer c.Unlock()
	for _, p := range c.pods {
		take(p)
	}
	return fmt.Sprint(c.version), nil
}

func (c *cluster) Watch(_ context.Context, version string) <-chan Change {
	c.Lock()
	defer c.Unlock()
	if version != fmt.Sprint(c.version) {
		c.t.Errorf("a watch from version %s, at %d", version, c.version)
	}
	w := make(chan Change, 100)
	w <- Change{}
	c.watchers = append(c.watchers, w)
	return w
}

func (c *cluster) tell(x Change) {
	c.version++
	for _, w := range c.watchers {
		w <- x
	}
}

func (c *cluster) expire() {
	c.Lock()
	defer c.Unlock()
	for _, w := range c.watchers {
		w <- Change{Err: ErrExpired}
		close(w)
	}
	c.watchers = nil
}

func (c *cluster) set(p Pod) {
	c.Lock()
	defer c.Unlock()
	c.pods[p.UID] = p
	c.tell(Change{Pod: p})
}

func (c *cluster) end(p Pod) {
	c.Lock()
	defer c.Unlock()
	delete(c.pods, p.UID)
	c.tell(Change{Pod: p, Gone: true})
}

func (c *cluster) note(format string, a ...any) {
	c.Lock()
	defer c.Unlock()
	c.diary = append(c.diary, fmt.Sprintf(format, a...))
}

func (c *cluster) Evict(_ context.Context, p Pod) error {
	c.Lock()
	_, there := c.pods[p.UID]
	c.Unlock()
	if !there {
		return ErrGone
	}
	if c.evict != nil {
		if err := c.evict(p); err != nil {
			return err
		}
	}
	c.note("evict %s", p.Name)
	time.AfterFunc(toEnd, func() {
		c.end(p)
		c.note("end %s", p.Name)
		if p.Controller != (Controller{}) {
			c.start(p)
		}
	})
	return nil
}

// start has the controller start another pod in place of one.
func (c *cluster) start(old Pod) {
	c.Lock()
	c.born++
	change := c.next
	next := old
	next.UID, next.Name = fmt.Sprintf("new-%d", c.born), fmt.Sprintf("%s-%d", old.Name, c.born)
	next.Addresses, next.Ready = pod("a/x", "", fmt.Sprintf("10.65.0.%d", c.born)).Addresses, false
	c.Unlock()
	if change != nil && !change(&old, &next) {
		return
	}
	c.set(next)
	if next.Succeeded {
		return
	}
	time.AfterFunc(toReady, func() {
		next.Ready = true
		c.set(next)
		c.note("ready %s", next.Name)
	})
}

func (c *cluster) release(_ context.Context, b Block) error {
	if err := c.kept[b.Number]; err != nil {
		return err
	}
	c.note("release %d", b.Number)
	return nil
}

// replace plans and runs within the bubble of synctest.
func (c *cluster) replace(ctx context.Context, blocks ...Block) (Result, error) {
	r := &Replacement{Cluster: c, Release: c.release, Timeout: 5 * time.Minute}
	p, err := r.Plan(ctx, blocks)
	if err != nil {
		c.t.Fatal(err)
	}
	return r.Run(ctx, p)
}

func (c *cluster) wrote(want ...string) {
	c.t.Helper()
	c.Lock()
	defer c.Unlock()
	if !slices.Equal(c.diary, want) {
		c.t.Errorf("it happened\n%s\nwant\n%s", strings.Join(c.diary, "\n"), strings.Join(want, "\n"))
	}
}

func (c *cluster) names() []string {
	c.Lock()
	defer c.Unlock()
	var out []string
	for _, p := range c.pods {
		out = append(out, p.Name)
	}
	slices.Sort(out)
	return out
}

func TestReplaceOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/y", "n1", "10.64.0.65"), pod("a/x", "n1", "10.64.0.34"), pod("a/w", "n2", "10.64.0.33"),
			pod("a/new", "n2", "10.65.0.200"))
		got, err := c.replace(t.Context(), first, second)
		if err != nil || len(got.Left) > 0 {
			t.Fatal(got, err)
		}
		c.wrote("evict w", "end w", "ready w-1", "evict x", "end x", "ready x-2", "release 1",
			"evict y", "end y", "ready y-3", "release 2")
		if want := []string{"new", "w-1", "x-2", "y-3"}; !slices.Equal(c.names(), want) {
			t.Errorf("pods %v, want %v", c.names(), want)
		}
		if want := "replaced pod a/w by w-1 (10.65.0.1 on n2)"; got.Done[0] != want {
			t.Errorf("%q, want %q", got.Done[0], want)
		}
		c.Lock()
		c.diary = nil
		c.Unlock()
		if got, err := c.replace(t.Context()); err != nil || len(got.Done) > 0 { // no block is reserved any more
			t.Errorf("a second time: %v, %v", got, err)
		}
		c.wrote()
	})
}

// A StatefulSet's next pod has the name of the old one; a DaemonSet's comes on the same node; a Job's may end.
func TestReplaceOfEachController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		of := func(kind, uid string) func(*Pod) {
			return func(p *Pod) { p.Controller = Controller{kind, strings.ToLower(kind), uid} }
		}
		c := newCluster(t, with(pod("a/db-0", "n1", "10.64.0.33"), of(statefulSet, "s")),
			with(pod("a/db-1", "n2", "10.65.0.100"), of(statefulSet, "s")),
			with(pod("a/agent", "n1", "10.64.0.34"), of(daemonSet, "d")),
			with(pod("a/task", "n1", "10.64.0.35"), of(job, "j")))
		c.next = func(old, next *Pod) bool {
			switch old.Controller.Kind {
			case statefulSet:
				next.Name = old.Name
			case job:
				next.Succeeded = true
			}
			return true
		}
		if got, err := c.replace(t.Context(), first); err != nil || len(got.Left) > 0 {
			t.Fatal(got, err)
		}
		c.wrote("evict db-0", "end db-0", "ready db-0", "evict agent", "end agent", "ready agent-2",
			"evict task", "end task", "release 1")
	})
}

// A budget that allows nothing now is asked again; one that never does leaves the pod and its block, and nothing else.
func TestABudgetIsHeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/never", "n1", "10.64.0.33"), pod("a/later", "n1", "10.64.0.65"))
		asked := map[string]int{}
		c.evict = func(p Pod) error {
			asked[p.Name]++
			if p.Name == "never" || asked[p.Name] < 4 {
				return &LaterError{Cause: "it would violate the pod's disruption budget"}
			}
			return nil
		}
		begun := time.Now()
		got, err := c.replace(t.Context(), first, second)
		if err != nil {
			t.Fatal(err)
		}
		c.wrote("evict later", "end later", "ready later-1", "release 2")
		if took, want := time.Since(begun), 5*time.Minute+3*askAgain+toEnd+toReady; took != want {
			t.Errorf("it took %s, want %s", took, want)
		}
		if n := asked["never"]; n < 59 || n > 61 { // at the end two timers fire at one moment
			t.Errorf("it asked %d times within 5m", n)
		}
		text := strings.Join(got.Left, "\n")
		for _, want := range []string{"pod a/never is not evicted: it would violate the pod's disruption budget, for 5m0s",
			"block 10.64.0.32/27,fd64::20/123 of pool default stays reserved: addresses of it have pod a/never"} {
			if !strings.Contains(text, want) {
				t.Errorf("it leaves\n%s\nwhich does not say %q", text, want)
			}
		}
	})
}

func TestAPodThatCannotBeEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.65"))
		c.evict = func(p Pod) error {
			if p.Name == "x" {
				return &RefusedError{"more than one PodDisruptionBudget"}
			}
			return nil
		}
		got, err := c.replace(t.Context(), first, second)
		if err != nil || len(got.Left) != 2 || !strings.Contains(got.Left[0], "more than one PodDisruptionBudget") {
			t.Error(got, err)
		}
		c.wrote("evict y", "end y", "ready y-1", "release 2")
		c.evict = func(Pod) error { return errors.New("create pods/eviction: forbidden") }
		_, err = c.replace(t.Context(), first)
		if err == nil || !strings.Contains(err.Error(), "evict pod a/x: create pods") {
			t.Errorf("what all pods would meet: %v", err)
		}
	})
}

// Nothing more is evicted when another pod does not come or is not ready, and a later run goes on.
func TestTheNextPodDoesNotCome(t *testing.T) {
	for name, c := range map[string]struct {
		next func(old, next *Pod) bool
		says string
	}{
		"none comes": {func(_, _ *Pod) bool { return false }, "ReplicaSet rs has started no other pod within 5m0s"},
		"one is never ready": {func(_, next *Pod) bool { next.Succeeded = true; return true },
			"pod a/x-1 of ReplicaSet rs is not ready within 5m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newCluster(t, pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.34"))
				k.next = c.next
				_, err := k.replace(t.Context(), first)
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%v, want %q", err, c.says)
				}
				k.wrote("evict x", "end x")
				k.Lock()
				k.next, k.diary = nil, nil
				k.Unlock()
				if _, err := k.replace(t.Context(), first); err != nil {
					t.Error(err)
				}
				k.wrote("evict y", "end y", "ready y-2", "release 1")
			})
		})
	}
}

// While Coil still gives addresses of a block, one pod shows it, and no other is lost.
func TestCoilStillStartsPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.34"))
		c.next = func(_, next *Pod) bool {
			next.Addresses = pod("a/x", "", "10.64.0.50").Addresses
			return true
		}
		_, err := c.replace(t.Context(), first)
		want := "pod a/x-1 (10.64.0.50 on n1), which came for pod a/x, has an address of " + first.String() +
			" again: Coil still starts pods there"
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nwant %s", err, want)
		}
		c.wrote("evict x", "end x", "ready x-1")
	})
}

// A block is released by what the apiserver says at that moment, and not by what was planned.
func TestAPodStartsMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"))
		time.AfterFunc(toEnd, func() {
			c.set(with(pod("b/late", "n2", "10.64.0.44"), func(p *Pod) { p.Controller.UID = "another" }))
		})
		got, err := c.replace(t.Context(), first)
		if err != nil || len(got.Left) != 1 || !strings.Contains(got.Left[0], "have pod b/late (10.64.0.44 on n2)") {
			t.Error(got, err)
		}
		c.wrote("evict x", "end x", "ready x-1")
	})
}

func TestAPodEndsMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y, z := pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.34"), pod("a/z", "n1", "10.64.0.35")
		c := newCluster(t, x, y, z)
		time.AfterFunc(toEnd, func() { c.end(y) })
		c.evict = func(p Pod) error {
			if p.Name == "z" { // it goes while the command waits to ask again, and none comes for it
				time.AfterFunc(time.Second, func() { c.end(z) })
				return &LaterError{Cause: "not now"}
			}
			return nil
		}
		got, err := c.replace(t.Context(), first)
		if err != nil || len(got.Left) > 0 {
			t.Fatal(got, err)
		}
		for _, want := range []string{"pod a/y has ended by itself", "pod a/z has ended by itself"} {
			if !slices.Contains(got.Done, want) {
				t.Errorf("%v does not say %q", got.Done, want)
			}
		}
		c.wrote("evict x", "end x", "ready x-1", "release 1")
	})
}

// An answer that did not come leaves open whether the pod was evicted: the next one is awaited all the same.
func TestAnAnswerIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"))
		c.evict = func(p Pod) error {
			c.evict = nil
			if err := c.Evict(t.Context(), p); err != nil {
				t.Error(err)
			}
			c.evict = func(Pod) error { return &UnheardError{"connection reset"} }
			return &UnheardError{"connection reset"}
		}
		if got, err := c.replace(t.Context(), first); err != nil || len(got.Left) > 0 {
			t.Error(got, err)
		}
		c.wrote("evict x", "end x", "ready x-1", "release 1")
		c.set(pod("a/y", "n1", "10.64.0.33"))
		_, err := c.replace(t.Context(), first)
		if err == nil || !strings.Contains(err.Error(), "evict pod a/y: connection reset, for 5m0s") {
			t.Errorf("an apiserver that never answers: %v", err)
		}
	})
}

func TestTheWatchBeginsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.34"))
		time.AfterFunc(toEnd/2, c.expire)
		time.AfterFunc(toEnd+toReady/2, c.expire)
		if got, err := c.replace(t.Context(), first); err != nil || len(got.Left) > 0 {
			t.Error(got, err)
		}
		c.wrote("evict x", "end x", "ready x-1", "evict y", "end y", "ready y-2", "release 1")
	})
}

func TestTheWatchIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"))
		time.AfterFunc(toEnd/2, func() {
			c.Lock()
			defer c.Unlock()
			c.watchers[0] <- Change{Err: errors.New("watch pods: forbidden")}
			close(c.watchers[0])
			c.watchers = nil
		})
		_, err := c.replace(t.Context(), first)
		if want := "pod a/x: it was evicted, and has not ended: watch pods: forbidden; give the command again"; err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	})
}

// A command that is ended in the middle says where it was, and goes on with the next.
func TestARunIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.34"))
		ctx, cancel := context.WithTimeout(t.Context(), toEnd+time.Second)
		defer cancel()
		_, err := c.replace(ctx, first)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "give the command again") {
			t.Error(err)
		}
		time.Sleep(time.Minute) // of the bubble's clock
		if got, err := c.replace(t.Context(), first); err != nil || len(got.Left) > 0 {
			t.Error(got, err)
		}
		c.wrote("evict x", "end x", "ready x-1", "evict y", "end y", "ready y-2", "release 1")
	})
}

func TestTheLogKeepsABlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, pod("a/x", "n1", "10.64.0.33"), pod("a/y", "n1", "10.64.0.65"))
		c.kept[first.Number] = fmt.Errorf("%w: it holds addresses of egress a/b", ErrKept)
		got, err := c.replace(t.Context(), first, second)
		if err != nil || len(got.Left) != 1 || !strings.Contains(got.Left[0], "has no pods any more, and stays reserved") {
			t.Error(got, err)
		}
		c.wrote("evict x", "end x", "ready x-1", "evict y", "end y", "ready y-2", "release 2")
		c.kept = map[uint64]error{first.Number: errors.New("no agent answers")}
		if _, err := c.replace(t.Context(), first, second); err == nil ||
			!strings.Contains(err.Error(), "release block 10.64.0.32/27,fd64::20/123 of pool default: no agent answers") {
			t.Errorf("a log that does not answer: %v", err)
		}
	})
}

func TestBarePodsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, with(pod("a/tool", "n1", "10.64.0.33"), alone))
		r := &Replacement{Cluster: c, Release: c.release, Timeout: time.Minute, Bare: true}
		p, err := r.Plan(t.Context(), []Block{first})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := r.Run(t.Context(), p); err != nil || !slices.Contains(got.Done, "removed pod a/tool") {
			t.Error(got, err)
		}
		c.wrote("evict tool", "end tool", "release 1")
	})
}
