package consensus

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// Everything this package writes to disk is sealed: one byte of format, the CRC-32C of the payload,
// the payload. bbolt checks its meta pages only, so a flipped bit would pass unseen without it.
const (
	sealFormat = 1
	packFormat = 2 // the payload is compressed
	sealHeader = 1 + crc32.Size

	maxBatchEvents = 1 << 16
	maxBatchBytes  = 32 << 20  // what is accepted, unpacked, too; the leader stops far below
	maxStateBytes  = 256 << 20 // what a decoder accepts
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func seal(payload []byte) []byte { return sealAs(sealFormat, payload) }

func sealAs(format byte, payload []byte) []byte {
	b := make([]byte, sealHeader, sealHeader+len(payload))
	b[0] = format
	binary.BigEndian.PutUint32(b[1:], crc32.Checksum(payload, castagnoli))
	return append(b, payload...)
}

// unseal returns the payload, which shares memory with b.
func unseal(b []byte) ([]byte, error) { return unsealAs(sealFormat, b) }

func unsealAs(format byte, b []byte) ([]byte, error) {
	if len(b) < sealHeader {
		return nil, fmt.Errorf("record of %d bytes is too short", len(b))
	}
	if b[0] != format {
		return nil, fmt.Errorf("record has format %d, want %d: it was written by another version", b[0], format)
	}
	if have, want := crc32.Checksum(b[sealHeader:], castagnoli), binary.BigEndian.Uint32(b[1:]); have != want {
		return nil, fmt.Errorf("record's checksum is %08x, want %08x", have, want)
	}
	return b[sealHeader:], nil
}

// EncodeBatch is the form of a batch as a Raft log entry.
func EncodeBatch(b *skeinv1.Batch) ([]byte, error) {
	payload, err := proto.Marshal(b)
	if err != nil {
		return nil, fmt.Errorf("encode a batch: %w", err)
	}
	if len(payload) > maxBatchBytes-sealHeader || len(b.GetEvents()) > maxBatchEvents {
		return nil, fmt.Errorf("batch of %d events and %d bytes is larger than %d and %d: no server could read it",
			len(b.GetEvents()), len(payload), maxBatchEvents, maxBatchBytes)
	}
	if len(payload) > packAbove {
		return packBatch(payload)
	}
	return seal(payload), nil
}

// packAbove is how large a batch gets before it is compressed. Raft gives a follower peerTimeout for a whole entry,
// however slow its line is, and an entry that never fits in stops the log for good: an import of 16,384 blocks shrinks
// to a tenth. Groups of other commands stay below (maxEntryBytes), so that servers that cannot unpack never see one.
const packAbove = 2 * maxEntryBytes

func packBatch(payload []byte) ([]byte, error) {
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(payload)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("compress a batch: %w", err)
	}
	return sealAs(packFormat, b.Bytes()), nil
}

// openBatch returns what EncodeBatch sealed, or why it is damaged.
func openBatch(b []byte) ([]byte, error) {
	if len(b) > 0 && b[0] == packFormat {
		return unpackBatch(b)
	}
	return unseal(b)
}

func unpackBatch(b []byte) ([]byte, error) {
	packed, err := unsealAs(packFormat, b)
	if err != nil {
		return nil, err
	}
	payload, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), maxBatchBytes+1))
	if err == nil && len(payload) > maxBatchBytes {
		err = fmt.Errorf("it is larger than %d bytes", maxBatchBytes)
	}
	return payload, err
}

// DecodeBatch reads what EncodeBatch wrote.
func DecodeBatch(b []byte) (*skeinv1.Batch, error) {
	if len(b) > maxBatchBytes {
		return nil, fmt.Errorf("batch of %d bytes is larger than %d", len(b), maxBatchBytes)
	}
	payload, err := openBatch(b)
	if err != nil {
		return nil, fmt.Errorf("decode a batch: %w", err)
	}
	var batch skeinv1.Batch
	if err := proto.Unmarshal(payload, &batch); err != nil {
		return nil, fmt.Errorf("decode a batch: %w", err)
	}
	return &batch, checkBatch(&batch)
}

// checkBatch refuses batches whose events do not follow their base without a gap.
func checkBatch(b *skeinv1.Batch) error {
	if len(b.Events) == 0 || len(b.Events) > maxBatchEvents {
		return fmt.Errorf("batch on index %d holds %d events, want 1 to %d", b.Base, len(b.Events), maxBatchEvents)
	}
	if b.Base > math.MaxUint64-maxBatchEvents {
		return fmt.Errorf("batch on index %d: there is no room behind it", b.Base)
	}
	for i, e := range b.Events {
		if e == nil || e.Index != b.Base+1+uint64(i) {
			return fmt.Errorf("batch on index %d: event %d has index %d, want %d", b.Base, i, e.GetIndex(), b.Base+1+uint64(i))
		}
	}
	return nil
}

func last(b *skeinv1.Batch) uint64 { return b.Base + uint64(len(b.Events)) }

// encodeState is the form of a state in snapshots and checkpoints. One of more than so many bytes is ErrTooLarge:
// DecodeState would refuse it.
func encodeState(s *events.State, most int) ([]byte, error) {
	if err := checkSealed(s, most); err != nil {
		return nil, err
	}
	payload, err := proto.Marshal(s.Proto())
	if err != nil {
		return nil, fmt.Errorf("encode the state at index %d: %w", s.Index(), err)
	}
	return seal(payload), nil
}

// DecodeState reads what a snapshot or a checkpoint holds.
func DecodeState(b []byte) (*events.State, error) {
	if len(b) > maxStateBytes {
		return nil, fmt.Errorf("state of %d bytes is larger than %d", len(b), maxStateBytes)
	}
	payload, err := unseal(b)
	if err != nil {
		return nil, fmt.Errorf("decode a state: %w", err)
	}
	var p skeinv1.State
	if err := proto.Unmarshal(payload, &p); err != nil {
		return nil, fmt.Errorf("decode a state: %w", err)
	}
	s, err := events.FromProto(&p)
	if err != nil {
		return nil, fmt.Errorf("decode a state: %w", err)
	}
	return s, nil
}

func encodeEvent(e *skeinv1.Event) ([]byte, error) {
	payload, err := proto.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode event %d: %w", e.GetIndex(), err)
	}
	return seal(payload), nil
}

func decodeEvent(index uint64, b []byte) (*skeinv1.Event, error) {
	payload, err := unseal(b)
	if err != nil {
		return nil, fmt.Errorf("event %d: %w", index, err)
	}
	e := new(skeinv1.Event)
	if err := proto.Unmarshal(payload, e); err != nil {
		return nil, fmt.Errorf("event %d: %w", index, err)
	}
	if e.Index != index {
		return nil, fmt.Errorf("event %d is stored as %d", e.Index, index)
	}
	return e, nil
}

func indexKey(i uint64) []byte { return binary.BigEndian.AppendUint64(nil, i) }

func keyIndex(k []byte) (uint64, error) {
	if len(k) != 8 {
		return 0, errors.New("a key has the wrong length")
	}
	return binary.BigEndian.Uint64(k), nil
}
