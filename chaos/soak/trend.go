package soak

import (
	"cmp"
	"maps"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Metric names a resource that is counted. Memory is in bytes.
type Metric string

// The resources. Connections are those that the kernel tracks in a network namespace, all others are an agent's.
const (
	Goroutines  Metric = "goroutines"
	Files       Metric = "files"
	Threads     Metric = "threads"
	Heap        Metric = "heap"
	RSS         Metric = "rss"
	Connections Metric = "connections"
)

// Metrics are all of them, in the order in which they are reported.
var Metrics = []Metric{Goroutines, Files, Threads, Heap, RSS, Connections}

const (
	mesh = "mesh" // the name under which the trends of all together are reported
	// A line through less than this says more about the moment than about the hour.
	shortestTrend = 2 * time.Minute
)

// Reading is what one agent, or one network namespace, holds at a moment.
type Reading struct {
	At     time.Duration // since the soak began; the same for all that were read together
	Of     string        // the node, or the namespace
	Run    int64         // tells two runs of a node's agent apart
	Values map[Metric]float64
}

// readingOf is what an agent says of itself.
func readingOf(at time.Duration, node string, u *skeinv1.UsageResponse) Reading {
	return Reading{At: at, Of: node, Run: u.GetStartedAt(), Values: map[Metric]float64{
		Goroutines: float64(u.GetGoroutines()), Files: float64(u.GetFiles()), Threads: float64(u.GetThreads()),
		Heap: float64(u.GetHeapBytes()), RSS: float64(u.GetRssBytes()),
	}}
}

// Trend is the line of least squares through readings.
type Trend struct {
	Of      string  `json:"of"` // a node whose agent ran so long, a namespace, or "mesh"
	Metric  Metric  `json:"metric"`
	Minutes float64 `json:"minutes"` // from the first reading to the last
	From    float64 `json:"from"`    // the line's ends
	To      float64 `json:"to"`
	PerHour float64 `json:"per_hour"`
}

type point struct {
	at    time.Duration
	value float64
}

// fit lays the line of least squares through points. There is none through points of one moment.
func fit(points []point) (t Trend, ok bool) {
	if len(points) < 2 {
		return Trend{}, false
	}
	var sumX, sumY float64
	first, last := points[0].at, points[0].at
	for _, p := range points {
		sumX, sumY = sumX+p.at.Hours(), sumY+p.value
		first, last = min(first, p.at), max(last, p.at)
	}
	if first == last {
		return Trend{}, false
	}
	n := float64(len(points))
	meanX, meanY := sumX/n, sumY/n
	var xy, xx float64
	for _, p := range points {
		dx := p.at.Hours() - meanX
		xy += dx * (p.value - meanY)
		xx += dx * dx
	}
	t.PerHour = xy / xx
	t.Minutes = (last - first).Minutes()
	t.From = meanY + t.PerHour*(first.Hours()-meanX)
	t.To = meanY + t.PerHour*(last.Hours()-meanX)
	return t, true
}

// Trends computes the trends of what was read after the time of warming up: of the mesh, which is the median of its
// agents and the sum of its connections, and of each run of an agent and each namespace that was read for at least so
// long.
func Trends(readings []Reading, warm, least time.Duration) (ofMesh, ofRuns []Trend) {
	ofMesh, ofRuns = []Trend{}, []Trend{}
	type run struct {
		of  string
		run int64
	}
	runs := map[Metric]map[run][]point{}
	rounds := map[Metric]map[time.Duration][]float64{}
	for _, r := range readings {
		for m, v := range r.Values {
			if runs[m] == nil {
				runs[m], rounds[m] = map[run][]point{}, map[time.Duration][]float64{}
			}
			if r.At < warm {
				continue
			}
			k := run{r.Of, r.Run}
			runs[m][k] = append(runs[m][k], point{r.At, v})
			rounds[m][r.At] = append(rounds[m][r.At], v)
		}
	}
	for _, m := range Metrics {
		var points []point
		for at, values := range rounds[m] {
			v := median(values)
			if m == Connections {
				v = sum(values)
			}
			points = append(points, point{at, v})
		}
		if t, ok := fit(points); ok && t.Minutes >= shortestTrend.Minutes() {
			t.Of, t.Metric = mesh, m
			ofMesh = append(ofMesh, t)
		}
		order := func(a, b run) int { return cmp.Or(cmp.Compare(a.of, b.of), cmp.Compare(a.run, b.run)) }
		for _, k := range slices.SortedFunc(maps.Keys(runs[m]), order) {
			if t, ok := fit(runs[m][k]); ok && t.Minutes >= least.Minutes() {
				t.Of, t.Metric = k.of, m
				ofRuns = append(ofRuns, t)
			}
		}
	}
	return ofMesh, ofRuns
}

// median is the middle value; of an even number the mean of the two in the middle. There must be one.
func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

func sum(values []float64) (all float64) {
	for _, v := range values {
		all += v
	}
	return all
}
