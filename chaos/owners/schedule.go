package owners

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Kind is what a fault does to a node.
type Kind string

// Kinds of faults.
const (
	Kill        Kind = "kill -9"              // the agent; it starts again at the end
	Pause       Kind = "pause"                // SIGSTOP, and SIGCONT at the end
	CutOff      Kind = "cut off"              // from all other hosts, the target too
	NoServers   Kind = "cut from the servers" // clients still reach it
	ToServers   Kind = "mute to the servers"  // what it sends them is lost
	FromServers Kind = "deaf to the servers"  // what they send is lost
	Drain       Kind = "drain"                // by command; undone at the end
	Clock       Kind = "clock jump"           // of the whole machine's wall clock, by Jump; back at the end
)

// Role is whom a fault hits. Which node that is turns out when it begins.
type Role string

// Roles.
const (
	Owner   Role = "the owner of slot" // number Slot of all slots of all egresses
	Leader  Role = "the leader"
	Gateway Role = "gateway" // number Slot
	Server  Role = "server"  // number Slot
	Machine Role = "the machine"
)

// Kinds are all there are.
var Kinds = []Kind{Kill, Pause, CutOff, NoServers, ToServers, FromServers, Drain, Clock}

// Fault is one thing that goes wrong.
type Fault struct {
	Kind Kind
	Role Role
	Slot int
	At   time.Duration // after the schedule's beginning
	For  time.Duration
	Jump time.Duration // of a clock; ahead, or back when below zero
}

// String is the fault in words.
func (f Fault) String() string {
	who, kind := string(f.Role), string(f.Kind)
	if f.Role != Leader && f.Role != Machine {
		who = fmt.Sprintf("%s %d", f.Role, f.Slot)
	}
	if f.Kind == Clock {
		kind += " of " + f.Jump.String()
	}
	return fmt.Sprintf("%s: %s after %s for %s", who, kind, f.At.Round(time.Millisecond), f.For.Round(time.Millisecond))
}

// Schedule is a row of faults that may overlap.
type Schedule struct {
	Number int
	Seed   uint64
	Faults []Fault
}

// String is the schedule in words.
func (s Schedule) String() string {
	var words []string
	for _, f := range s.Faults {
		words = append(words, f.String())
	}
	return strings.Join(words, "; ")
}

// World is how many there are of whom faults can hit.
type World struct {
	Slots, Gateways, Servers int
	Clock                    bool // the machine's wall clock may be turned
}

// Bounds of faults.
const (
	shortestPause = 200 * time.Millisecond
	longestPause  = 5 * time.Second
	shortestFault = 1500 * time.Millisecond
	longestFault  = 3500 * time.Millisecond
	latestSecond  = 1200 * time.Millisecond // when the second of two begins, after the first
	shortestJump  = 2 * time.Minute         // of a clock
	longestJump   = 2 * time.Hour
)

// Plan makes one schedule of a seed: the same always. A third has two faults; of several servers no two are ever down
// at once, since then nothing at all can be decided, which is another test's matter.
func (w World) Plan(seed uint64, number int) Schedule {
	r := rand.New(rand.NewPCG(seed, uint64(number)))
	s := Schedule{Number: number, Seed: seed, Faults: []Fault{w.fault(r)}}
	if r.IntN(3) == 0 {
		second := w.fault(r)
		for second.onServer() && s.Faults[0].onServer() || second.Kind == s.Faults[0].Kind && (second.Kind == Drain ||
			second.Kind == Clock) {
			second = w.fault(r)
		}
		second.At = time.Duration(r.Int64N(int64(latestSecond)))
		s.Faults = append(s.Faults, second)
	}
	return s
}

// onServer tells faults that take a server away from the others.
func (f Fault) onServer() bool { return f.Role == Leader || f.Role == Server }

func (w World) fault(r *rand.Rand) Fault {
	f := Fault{For: between(r, shortestFault, longestFault)}
	if w.Clock && r.IntN(4) == 0 {
		f.Kind, f.Role, f.Jump = Clock, Machine, between(r, shortestJump, longestJump).Round(time.Second)
		if r.IntN(2) == 0 {
			f.Jump = -f.Jump
		}
		return f
	}
	switch n := r.IntN(10); {
	case n < 6:
		f.Role, f.Slot = Owner, r.IntN(w.Slots)
	case n < 8:
		f.Role = Leader
	case n < 9:
		f.Role, f.Slot = Gateway, r.IntN(w.Gateways)
	default:
		f.Role, f.Slot = Server, r.IntN(w.Servers)
	}
	kinds := []Kind{Kill, Pause, Pause, CutOff, NoServers, NoServers, ToServers, FromServers, Drain}
	if f.onServer() {
		if kinds = kinds[:3]; w.Servers > 1 {
			kinds = append(kinds, NoServers, ToServers, FromServers)
		}
	}
	if f.Kind = kinds[r.IntN(len(kinds))]; f.Kind == Pause {
		f.For = between(r, shortestPause, longestPause)
	}
	return f
}

func between(r *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(r.Int64N(int64(high-low)))
}
