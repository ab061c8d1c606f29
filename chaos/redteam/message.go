package redteam

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

// maxAnswer bounds the answer of an honest node, in bytes.
const maxAnswer = 64 << 20

// writeMessage writes a length (4 bytes, big endian) and a message, as the port for joiners wants it.
func writeMessage(w io.Writer, m proto.Message) error {
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 4), m)
	if err != nil {
		return err
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	_, err = w.Write(b)
	return err
}

func readMessage(r io.Reader, m proto.Message) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxAnswer {
		return fmt.Errorf("an answer of %d bytes", n)
	}
	b, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err != nil {
		return err
	}
	return proto.Unmarshal(b, m)
}

func marshal(m proto.Message) ([]byte, error) { return proto.Marshal(m) }
