package kube

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestARecordSurvivesItsAnnotation(t *testing.T) {
	want := &skeinv1.SignedRecord{Record: []byte("a record\x00\xff"), Signature: []byte{1, 2, 3}}
	text, err := Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	have, err := Decode(text)
	if err != nil || !proto.Equal(have, want) {
		t.Errorf("%v, %v", have, err)
	}
	for _, bad := range []string{"", "1", "2." + text[2:], "1.!", text[:len(text)-3] + "\x00\x00\x00",
		"1." + strings.Repeat("A", maxValue)} {
		if s, err := Decode(bad); err == nil {
			t.Errorf("%.20q is read as %v", bad, s)
		} else if !strings.Contains(err.Error(), Annotation) {
			t.Errorf("%.20q: %v does not name the annotation", bad, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add("1.CgEB")
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Decode(s)
		if err != nil {
			return
		}
		again, err := Encode(r)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := Decode(again); err != nil || !proto.Equal(back, r) {
			t.Errorf("%q: %v, %v", s, back, err)
		}
	})
}

func record(edit func(*skeinv1.Record)) *skeinv1.Record {
	r := &skeinv1.Record{NodeId: "n", Epoch: 3, Seq: 9, Candidates: []*skeinv1.Candidate{{Address: "192.0.2.1:51820"}},
		RelayLinks: []*skeinv1.RelayLink{{NodeId: "r", RttMicros: 800}}}
	if edit != nil {
		edit(r)
	}
	return r
}

func TestOnlyWhatOthersActOnIsWritten(t *testing.T) {
	for what, edit := range map[string]func(*skeinv1.Record){
		"number":          func(r *skeinv1.Record) { r.Epoch, r.Seq, r.Time = 4, 1, 7 },
		"index":           func(r *skeinv1.Record) { r.AppliedIndex, r.StateHash = 7, []byte{1} },
		"summary":         func(r *skeinv1.Record) { r.PeersDirect, r.PeersRelay, r.TransportMode = 1, 2, "mixed" },
		"round-trip time": func(r *skeinv1.Record) { r.RelayLinks[0].RttMicros = 90000 },
		"guessing":        func(r *skeinv1.Record) { r.NatMappings, r.Outcomes = 9, []*skeinv1.PairOutcome{{}} },
	} {
		if Content(record(edit)) != Content(record(nil)) {
			t.Errorf("a changed %s is worth a write", what)
		}
	}
	for what, edit := range map[string]func(*skeinv1.Record){
		"candidate": func(r *skeinv1.Record) { r.Candidates[0].Address = "192.0.2.2:51820" },
		"relay":     func(r *skeinv1.Record) { r.RelayLinks[0].NodeId = "other" },
		"site":      func(r *skeinv1.Record) { r.Site = "lab" },
	} {
		if Content(record(edit)) == Content(record(nil)) {
			t.Errorf("a changed %s is not worth a write", what)
		}
	}
}
