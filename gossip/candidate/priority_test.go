package candidate

import "testing"

// Priorities are in signed records, and other versions read them: they stay as they are.
func TestPriorities(t *testing.T) {
	for name, c := range map[string]struct{ have, want int }{
		"forced": {PriorityForced, 300}, "reflexive": {PriorityReflexive, 200}, "host": {PriorityHost, 100},
		"reflexive behind a symmetric NAT": {PrioritySymmetric, 50},
	} {
		if c.have != c.want {
			t.Errorf("%s: %d, want %d", name, c.have, c.want)
		}
	}
}
