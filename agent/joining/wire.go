package joining

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Sizes of messages, in bytes. A state of some ten thousand nodes fits into a join's answer.
const (
	maxSignal       = 2 << 10
	MaxJoinRequest  = 64 << 10
	MaxJoinResponse = 64 << 20
)

// WriteMessage writes a length (4 bytes, big endian) and an encoded message.
func WriteMessage(w io.Writer, m proto.Message) error {
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 4), m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	_, err = w.Write(b)
	return err
}

// ReadMessage reads what writeMessage wrote, at most limit bytes. It allocates what has arrived, not
// what was announced.
func ReadMessage(r io.Reader, m proto.Message, limit uint32) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return fmt.Errorf("read the length of %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > limit {
		return fmt.Errorf("%s of %d bytes is too large (at most %d)", m.ProtoReflect().Descriptor().Name(), n, limit)
	}
	b, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && uint32(len(b)) < n {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}

// DecodeSignal reads a signal that a node sent; the control net has proved who that is.
func DecodeSignal(from identity.ID, b []byte) (*skeinv1.Signal, error) {
	if len(b) > maxSignal {
		return nil, fmt.Errorf("signal of %d bytes is too large (at most %d)", len(b), maxSignal)
	}
	s := &skeinv1.Signal{}
	if err := proto.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("decode a signal: %w", err)
	}
	if s.GetFrom() != from.String() {
		return nil, fmt.Errorf("the signal says it is from %.40q, and node %s sent it", s.GetFrom(), from)
	}
	return s, nil
}
