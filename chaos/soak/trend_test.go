package soak

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6*math.Max(1, math.Abs(b)) }

func TestFit(t *testing.T) {
	every := func(values ...float64) (points []point) {
		for i, v := range values {
			points = append(points, point{time.Duration(i) * time.Minute, v})
		}
		return points
	}
	for _, c := range []struct {
		name          string
		points        []point
		ok            bool
		perHour, from float64
	}{
		{"nothing", nil, false, 0, 0},
		{"one reading", every(7), false, 0, 0},
		{"readings of one moment", []point{{time.Minute, 1}, {time.Minute, 9}}, false, 0, 0},
		{"level", every(5, 5, 5, 5), true, 0, 5},
		{"one more each minute", every(10, 11, 12, 13), true, 60, 10},
		{"falling", every(9, 7, 5), true, -120, 9},
		{"a saw rises no more than its teeth", every(0, 1, 0, 1, 0), true, 0, 0.4},
		{"in any order", []point{{3 * time.Minute, 6}, {0, 0}, {time.Minute, 2}}, true, 120, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, ok := fit(c.points)
			if ok != c.ok || ok && (!near(got.PerHour, c.perHour) || !near(got.From, c.from)) {
				t.Errorf("%+v, %v", got, ok)
			}
		})
	}
}

// readings are those of three agents for half an hour, of which one leaks a goroutine a minute and another is restarted
// each minute.
func readings() (all []Reading) {
	r := rand.New(rand.NewPCG(1, 1))
	for at := time.Duration(0); at <= 30*time.Minute; at += 10 * time.Second {
		noise := func(v float64) map[Metric]float64 { return map[Metric]float64{Goroutines: v + r.Float64()*4 - 2} }
		warming := 0.0
		if at < 3*time.Minute {
			warming = 200 // what a start takes is not a trend
		}
		all = append(all,
			Reading{at, "calm", 1, noise(100 + warming)},
			Reading{at, "leaks", 1, noise(100 + warming + at.Minutes())},
			Reading{at, "killed", int64(at / time.Minute), noise(100 + warming)},
			Reading{at, "router", 0, map[Metric]float64{Connections: 50}},
			Reading{at, "core", 0, map[Metric]float64{Connections: 10 + at.Hours()}})
	}
	return all
}

func TestTrends(t *testing.T) {
	ofMesh, ofRuns := Trends(readings(), 3*time.Minute, 10*time.Minute)
	find := func(all []Trend, of string, m Metric) Trend {
		i := slices.IndexFunc(all, func(t Trend) bool { return t.Of == of && t.Metric == m })
		if i < 0 {
			return Trend{PerHour: math.NaN()}
		}
		return all[i]
	}
	if g := find(ofMesh, mesh, Goroutines); !(math.Abs(g.PerHour) < 10) {
		t.Errorf("the median of three of which one leaks: %+v", g)
	}
	if c := find(ofMesh, mesh, Connections); !near(c.PerHour, 1) || c.From < 60 {
		t.Errorf("the sum of all connections: %+v", c)
	}
	if g := find(ofRuns, "leaks", Goroutines); !(math.Abs(g.PerHour-60) < 3) || g.Minutes != 27 {
		t.Errorf("one goroutine a minute: %+v", g)
	}
	if g := find(ofRuns, "calm", Goroutines); !(math.Abs(g.PerHour) < 3) {
		t.Errorf("none: %+v", g)
	}
	if g := find(ofRuns, "killed", Goroutines); !math.IsNaN(g.PerHour) {
		t.Errorf("a minute of running is no hour: %+v", g)
	}
}

// An agent is judged alone, relays are judged together: sessions move from one relay to another.
func TestJudge(t *testing.T) {
	group := func(of string) string {
		if strings.HasPrefix(of, "relay") {
			return "relays"
		}
		return of
	}
	members := func(of string) int { return map[string]int{"relays": 2}[group(of)] + 1 }
	held := func(goroutines ...float64) map[string]map[Metric]float64 {
		var all []Reading
		for i, of := range []string{"home1", "relay1", "relay2"} {
			all = append(all, Reading{Of: of, Values: map[Metric]float64{Goroutines: goroutines[i], Heap: 10 << 20,
				RSS: 40 << 20}})
		}
		return together(all, group)
	}
	for _, c := range []struct {
		name       string
		start, end map[string]map[Metric]float64
		want       string // in the error; "": none
	}{
		{"the same", held(100, 200, 200), held(100, 200, 200), ""},
		{"within the noise", held(100, 200, 200), held(130, 200, 200), ""},
		{"less", held(100, 200, 200), held(10, 20, 20), ""},
		{"what one relay held, another holds", held(100, 300, 100), held(100, 100, 300), ""},
		{"too many in an agent", held(100, 200, 200), held(260, 200, 200),
			"home1 holds 260 goroutines at rest, and held 100 goroutines before the first fault: more than 141 goroutines is " +
				"a leak"},
		{"too many in the relays", held(100, 200, 200), held(100, 400, 400), "relays holds 800 goroutines"},
		{"not counted again", held(100, 200, 200), nil, "goroutines of home1 were not counted at the end"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rests, err := Judge(c.start, c.end, members)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if c.end != nil && len(rests) != 4 { // goroutines and heap of two; RSS never falls again and is not judged
				t.Errorf("%+v", rests)
			}
		})
	}
	lowest := held(400, 300, 300)
	lower(lowest, held(100, 400, 400))
	if _, err := Judge(held(100, 300, 300), lowest, members); err != nil {
		t.Errorf("what is given back late is not a leak: %v", err)
	}
}

func TestCrashIn(t *testing.T) {
	const fine = "--- lab: skein up at 2026-03-01T12:00:00Z\ntime=2026-03-01T12:00:01Z level=WARN msg=\"panic: at the " +
		"disco\"\n"
	for _, c := range []struct{ log, want string }{
		{"", ""},
		{fine, ""},
		{fine + "panic: assignment to entry in nil map\n\ngoroutine 7 [running]:\n", "panic: assignment to entry in nil map"},
		{fine + "fatal error: concurrent map writes", "fatal error: concurrent map writes"},
		{strings.Repeat("x", 1<<20) + "\nfatal error: stack overflow\n", "fatal error: stack overflow"},
	} {
		if got, err := crashIn(strings.NewReader(c.log)); err != nil || got != c.want {
			t.Errorf("%.40q: %q, %v, want %q", c.log, got, err, c.want)
		}
	}
}
