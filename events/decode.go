package events

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Limits of what is decoded from outside, in bytes.
const (
	MaxCommandBytes = 64 << 10
	MaxBatchBytes   = 16 << 20
	MaxStateBytes   = 512 << 20
)

// DecodeCommand reads a command from bytes of another node.
func DecodeCommand(b []byte) (*skeinv1.Command, error) {
	c := &skeinv1.Command{}
	if err := decode("command", b, MaxCommandBytes, c); err != nil {
		return nil, err
	}
	return c, nil
}

// DecodeBatch reads a log entry and checks that its events follow its base without a gap.
func DecodeBatch(b []byte) (*skeinv1.Batch, error) {
	batch := &skeinv1.Batch{}
	if err := decode("batch of events", b, MaxBatchBytes, batch); err != nil {
		return nil, err
	}
	for i, e := range batch.GetEvents() {
		if want := batch.GetBase() + uint64(i) + 1; e.GetIndex() != want {
			return nil, fmt.Errorf("batch of events on %d: event %d stands where %d belongs: %w", batch.GetBase(), e.GetIndex(), want, ErrGap)
		}
	}
	return batch, nil
}

// DecodeState reads a snapshot.
func DecodeState(b []byte) (*State, error) {
	p := &skeinv1.State{}
	if err := decode("snapshot", b, MaxStateBytes, p); err != nil {
		return nil, err
	}
	return FromProto(p)
}

func decode(what string, b []byte, limit int, m proto.Message) error {
	if len(b) > limit {
		return fmt.Errorf("%s: it has %d bytes and may have %d", what, len(b), limit)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("%s: it is damaged or from another program: %w", what, err)
	}
	return nil
}
