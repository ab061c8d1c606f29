package gossip

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// mark identifies one version of one node's record.
type mark struct {
	ID    identity.ID
	Epoch uint64
	Seq   uint64
	Sum   [sumSize]byte // first bytes of SHA-256 over the encoded record
}

const (
	sumSize  = 8
	markSize = 8 + 8 + 8 + sumSize

	metaVersion = 1
	metaLarge   = 0x80 // the record is too large to be broadcast: pull it
	metaSize    = 1 + markSize

	// maxDigests bounds the marks in one digest: 8 times the fleet skein is built for.
	maxDigests = 8192
	// maxDigestBytes is what maxDigests marks can take on the wire.
	maxDigestBytes = maxDigests * 64
)

var errMeta = errors.New("metadata is not 33 bytes of version 1")

func sumOf(record []byte) [sumSize]byte {
	h := sha256.Sum256(record)
	return [sumSize]byte(h[:sumSize])
}

// newer is a total order over the versions of one node's record. With equal numbers (a node that
// signed twice under one number) the lower sum wins, so that all nodes choose the same.
func (m mark) newer(than mark) bool {
	if m.Epoch != than.Epoch {
		return m.Epoch > than.Epoch
	}
	if m.Seq != than.Seq {
		return m.Seq > than.Seq
	}
	return bytes.Compare(m.Sum[:], than.Sum[:]) < 0
}

// sameNumber reports whether both carry the same (epoch, seq).
func (m mark) sameNumber(o mark) bool { return m.Epoch == o.Epoch && m.Seq == o.Seq }

func (m mark) append(b []byte) []byte {
	b = append(b, m.ID[:]...)
	b = binary.BigEndian.AppendUint64(b, m.Epoch)
	b = binary.BigEndian.AppendUint64(b, m.Seq)
	return append(b, m.Sum[:]...)
}

func encodeMeta(m mark, large bool) []byte {
	v := byte(metaVersion)
	if large {
		v |= metaLarge
	}
	return m.append(append(make([]byte, 0, metaSize), v))
}

// decodeMeta reads what encodeMeta wrote; bytes of later versions may follow.
func decodeMeta(b []byte) (m mark, large bool, err error) {
	if len(b) < metaSize || b[0]&^metaLarge != metaVersion {
		return mark{}, false, errMeta
	}
	return decodeMark(b[1:]), b[0]&metaLarge != 0, nil
}

// decodeMark reads markSize bytes.
func decodeMark(b []byte) (m mark) {
	copy(m.ID[:], b)
	m.Epoch = binary.BigEndian.Uint64(b[8:])
	m.Seq = binary.BigEndian.Uint64(b[16:])
	copy(m.Sum[:], b[24:])
	return m
}

func encodeDigests(from identity.ID, marks []mark) *skeinv1.Digests {
	d := &skeinv1.Digests{From: from.String(), Have: make([]*skeinv1.RecordDigest, 0, len(marks))}
	for _, m := range marks {
		d.Have = append(d.Have, &skeinv1.RecordDigest{NodeId: m.ID.String(), Epoch: m.Epoch, Seq: m.Seq, Sum: m.Sum[:]})
	}
	return d
}

// decodeDigests reads an encoded Digests message.
func decodeDigests(b []byte) (from identity.ID, marks []mark, err error) {
	if len(b) > maxDigestBytes {
		return from, nil, fmt.Errorf("digests of %d bytes, the limit is %d", len(b), maxDigestBytes)
	}
	var d skeinv1.Digests
	if err := unmarshal.Unmarshal(b, &d); err != nil {
		return from, nil, fmt.Errorf("read digests: %w", err)
	}
	if len(d.GetHave()) > maxDigests {
		return from, nil, fmt.Errorf("%d digests, the limit is %d", len(d.GetHave()), maxDigests)
	}
	if from, err = parseID(d.GetFrom()); err != nil {
		return from, nil, fmt.Errorf("digests' sender: %w", err)
	}
	marks = make([]mark, 0, len(d.GetHave()))
	for _, h := range d.GetHave() {
		id, err := parseID(h.GetNodeId())
		if err != nil {
			return from, nil, fmt.Errorf("digest: %w", err)
		}
		if len(h.GetSum()) != sumSize {
			return from, nil, fmt.Errorf("digest of node %s: sum of %d bytes, want %d", id, len(h.GetSum()), sumSize)
		}
		marks = append(marks, mark{ID: id, Epoch: h.GetEpoch(), Seq: h.GetSeq(), Sum: [sumSize]byte(h.GetSum())})
	}
	return from, marks, nil
}

// parseID accepts only the one spelling that ID.String prints.
func parseID(s string) (identity.ID, error) {
	id, err := identity.ParseID(s)
	if err == nil && id.String() != s {
		err = fmt.Errorf("node ID %q: want lower-case hex digits", s)
	}
	return id, err
}
