package kube

import (
	"encoding/base64"
	"fmt"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
)

// Annotation holds a node's signed record on its Node.
const Annotation = "skein.dev/record"

// version begins each value, so that another encoding can follow.
const version = "1."

// maxValue bounds what is decoded, in characters.
var maxValue = len(version) + base64.RawStdEncoding.EncodedLen(gossip.MaxRecordBytes+256)

// Encode is an annotation's value for a record.
func Encode(s *skeinv1.SignedRecord) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encode the record for annotation %s: %w", Annotation, err)
	}
	return version + base64.RawStdEncoding.EncodeToString(b), nil
}

// Decode reads an annotation's value. What it returns has not been verified.
func Decode(value string) (*skeinv1.SignedRecord, error) {
	if len(value) > maxValue {
		return nil, fmt.Errorf("annotation %s has %d characters, a record has %d at most", Annotation, len(value),
			maxValue)
	}
	if len(value) < len(version) || value[:len(version)] != version {
		return nil, fmt.Errorf("annotation %s does not begin with %q: it is of another version, or not skein's",
			Annotation, version)
	}
	b, err := base64.RawStdEncoding.DecodeString(value[len(version):])
	if err != nil {
		return nil, fmt.Errorf("annotation %s: %w", Annotation, err)
	}
	s := &skeinv1.SignedRecord{}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", Annotation, err)
	}
	return s, nil
}

// Content is the part of a record by which others find the node: two records with the same content are not worth a
// second write. It leaves out what changes by itself.
func Content(r *skeinv1.Record) string {
	c := proto.CloneOf(r)
	c.Epoch, c.Seq, c.Time, c.AppliedIndex, c.StateHash = 0, 0, 0, 0, nil
	c.PeersDirect, c.PeersRelay, c.TransportMode, c.NatMappings, c.Outcomes, c.Away = 0, 0, "", 0, nil, nil
	for _, l := range c.GetRelayLinks() {
		l.RttMicros = 0
	}
	b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(c) // a record that was signed can be encoded
	return string(b)
}
