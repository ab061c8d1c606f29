package events

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// answerKey is what an answer is remembered under: request IDs belong to their issuer and to one kind of command, so
// that nobody is answered what another was, and an admission also to the identity that is admitted, since it is issued
// by the seed. It is a hash, so that the state shows no request ID. Versions before it remember answers under the
// request ID itself, which says nothing of the issuer: those are never found under a key, and what an old leader has
// answered is decided again.
func answerKey(c *skeinv1.Command) string {
	if c.GetRequestId() == "" {
		return ""
	}
	var kind uint64
	m := c.ProtoReflect()
	if f := m.WhichOneof(m.Descriptor().Oneofs().ByName("body")); f != nil {
		kind = uint64(f.Number())
	}
	b := append([]byte("skein answer v1\x00"), binary.BigEndian.AppendUint64(nil, kind)...)
	for _, part := range []string{c.GetIssuer(), c.GetRequestId(), string(c.GetAdmitNode().GetNode().GetIdentityKey())} {
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(part))), part...)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// remembered is the first answer to a command that was decided before, as its caller shall have it, or nil.
func (s *State) remembered(c *skeinv1.Command) *skeinv1.Answer {
	key := answerKey(c)
	if key == "" {
		return nil
	}
	a := s.AnswerTo(key)
	if a == nil {
		return nil
	}
	out := proto.CloneOf(a)
	out.RequestId = c.GetRequestId()
	return out
}
