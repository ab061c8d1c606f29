package candidate

import (
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	typeHost   = skeinv1.CandidateType_CANDIDATE_TYPE_HOST
	typeSrflx  = skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX
	typeRelay  = skeinv1.CandidateType_CANDIDATE_TYPE_RELAY
	typeForced = skeinv1.CandidateType_CANDIDATE_TYPE_FORCED
)

// Priorities are in signed records, and other versions read them: they stay as they are.
func TestPriorities(t *testing.T) {
	for name, c := range map[string]struct{ have, want uint32 }{
		"forced": {PriorityForced, 300}, "host": {PriorityHost, 250}, "reflexive": {PriorityReflexive, 200},
		"reflexive behind a symmetric NAT": {PrioritySymmetric, 50}, "relay": {PriorityRelay, 10},
		"host of an older agent":   {Priority(&skeinv1.Candidate{Type: typeHost, Priority: 100}), 250},
		"without a number":         {Priority(&skeinv1.Candidate{Type: typeForced}), 300},
		"reflexive as it is":       {Priority(&skeinv1.Candidate{Type: typeSrflx, Priority: 50}), 50},
		"reflexive without number": {Priority(&skeinv1.Candidate{Type: typeSrflx}), 200},
		"relay without a number":   {Priority(&skeinv1.Candidate{Type: typeRelay}), 10},
	} {
		if c.have != c.want {
			t.Errorf("%s: %d, want %d", name, c.have, c.want)
		}
	}
}

// The number is the order: a record of this version and one of an older are tried alike.
func TestSortedByPriority(t *testing.T) {
	for name, host := range map[string]uint32{"this version": PriorityHost, "an older agent": 100} {
		cs := Sorted([]*skeinv1.Candidate{
			{Type: typeRelay, Address: "relay", Priority: PriorityRelay}, {Type: typeSrflx, Address: "symmetric",
				Priority: PrioritySymmetric},
			{Type: typeSrflx, Address: "mapped", Priority: PriorityReflexive}, {Type: typeHost, Address: "lan", Priority: host},
			{Type: typeForced, Address: "forced", Priority: PriorityForced}, {Type: typeSrflx, Address: "cloud",
				Priority: PriorityReflexive},
		})
		have := ""
		for _, c := range cs {
			have += c.GetAddress() + " "
		}
		if want := "forced lan mapped cloud symmetric relay "; have != want {
			t.Errorf("%s: %s, want %s", name, have, want)
		}
	}
}
