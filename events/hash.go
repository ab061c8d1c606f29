package events

import (
	"crypto/sha256"
	"encoding/binary"

	"google.golang.org/protobuf/proto"
)

// hashVersion starts every hash, so that a change of the encoding cannot be taken for divergence.
const hashVersion = "skein state v1\x00"

// Hash is the canonical hash of everything in Proto(): equal states have equal hashes on every
// machine and in every version that shares the encoding. It costs what changed since the last call.
func (s *State) Hash() [32]byte {
	b := make([]byte, 0, len(hashVersion)+16+11*32)
	b = append(b, hashVersion...)
	b = binary.BigEndian.AppendUint64(b, s.index)
	b = binary.BigEndian.AppendUint64(b, uint64(s.time))
	for _, d := range [...][32]byte{
		s.cluster.sum(), s.settings.sum(), s.gossipKeys.sum(),
		s.nodes.sum(encode), s.revoked.sum(encode), s.servers.sum(encode), s.tokens.sum(encode), s.answers.sum(encode),
	} {
		b = append(b, d[:]...)
	}
	// What schema 2 brought counts only once something of it is there: until then servers of both versions must
	// agree, while they are upgraded one by one.
	if s.pools.n > 0 {
		d := s.pools.sum(encodePoolState)
		b = append(b, d[:]...)
	}
	// Schema 3 likewise.
	if s.outlets.n > 0 {
		d := s.outlets.sum(encodeOutlet)
		b = append(b, d[:]...)
	}
	// Schema 6 likewise.
	if s.plain.n > 0 {
		d := s.plain.sum(encode)
		b = append(b, d[:]...)
	}
	// Schema 7 likewise.
	if s.translations.n > 0 {
		d := s.translations.sum(encode)
		b = append(b, d[:]...)
	}
	if s.rangeTable.n > 0 {
		d := s.rangeTable.sum(encode)
		b = append(b, d[:]...)
	}
	return sha256.Sum256(b)
}

func encode[M proto.Message](b []byte, m M) []byte { return appendMessage(b, m) }
