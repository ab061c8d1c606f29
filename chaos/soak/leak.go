package soak

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Rest is what one agent or namespace, or several that are judged together, held at rest before the first fault, and
// holds at rest after the last.
type Rest struct {
	Of     string  `json:"of"`
	Metric Metric  `json:"metric"`
	Start  float64 `json:"start"`
	End    float64 `json:"end"`
	Most   float64 `json:"most"` // that End may be
}

// slack is by how much a resource may have grown: a share of what it was, and so many for each that is judged.
type slack struct{ share, each float64 }

// slacks bound what a mesh at rest may hold more than it held before. A share, since what an agent holds for a peer
// depends on which way the pair goes now; and a number, since an agent that is measured answers that request, looks for
// its router, renews something just then. What faults leak grows with them: a soak of 30 minutes restarts hundreds of
// agents, which is far above this, with one goroutine, file or connection left by each.
var slacks = map[Metric]slack{
	Goroutines:  {0.25, 16},
	Files:       {0.25, 16},
	Connections: {0.5, 64},
	Heap:        {0.25, 4 << 20},
}

// together sums readings that are judged together: group names for each node or namespace what it is judged as.
func together(readings []Reading, group func(of string) string) map[string]map[Metric]float64 {
	out := map[string]map[Metric]float64{}
	for _, r := range readings {
		g := group(r.Of)
		if out[g] == nil {
			out[g] = map[Metric]float64{}
		}
		for m, v := range r.Values {
			out[g][m] += v
		}
	}
	return out
}

// lower keeps the lowest of what was held: a mesh comes to rest by and by, and what is collected late is not a leak.
func lower(lowest, now map[string]map[Metric]float64) {
	for of, values := range now {
		if lowest[of] == nil {
			lowest[of] = maps.Clone(values)
			continue
		}
		for m, v := range values {
			if was, ok := lowest[of][m]; !ok || v < was {
				lowest[of][m] = v
			}
		}
	}
}

// Judge compares what was held at rest. The error names all that holds more than it may, and all that could not be
// compared since it was read only once. What is named last is not judged.
func Judge(start, end map[string]map[Metric]float64, members func(of string) int, not ...Metric) ([]Rest, error) {
	var out []Rest
	var errs []error
	for _, m := range Metrics {
		limit, judged := slacks[m]
		if !judged || slices.Contains(not, m) {
			continue
		}
		for _, of := range slices.Sorted(maps.Keys(start)) {
			was, ok := start[of][m]
			if !ok {
				continue
			}
			is, ok := end[of][m]
			if !ok {
				errs = append(errs, fmt.Errorf("%s of %s were not counted at the end", m, of))
				continue
			}
			r := Rest{Of: of, Metric: m, Start: was, End: is, Most: was*(1+limit.share) + limit.each*float64(members(of))}
			out = append(out, r)
			if r.End > r.Most {
				errs = append(errs, fmt.Errorf("%s holds %s at rest, and held %s before the first fault: more than %s is a leak",
					of, amount(m, r.End), amount(m, r.Start), amount(m, r.Most)))
			}
		}
	}
	return out, errors.Join(errs...)
}

// amount writes so much of a resource.
func amount(m Metric, v float64) string {
	if m == Heap || m == RSS {
		return fmt.Sprintf("%.1f MiB (%s)", v/(1<<20), m)
	}
	return fmt.Sprintf("%.0f %s", v, m)
}

// Nearest is, for each metric, what came nearest to what it may hold.
func Nearest(all []Rest) (out []Rest) {
	for _, m := range Metrics {
		of := slices.DeleteFunc(slices.Clone(all), func(r Rest) bool { return r.Metric != m })
		if len(of) > 0 {
			out = append(out, slices.MaxFunc(of, func(a, b Rest) int { return cmp.Compare(a.End/a.Most, b.End/b.Most) }))
		}
	}
	return out
}
