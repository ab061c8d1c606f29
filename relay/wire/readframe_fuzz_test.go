package wire

import (
	"bytes"
	"testing"
)

// FuzzReadFrame reads the answer that precedes a spliced stream: one frame, and not a byte of the stream.
func FuzzReadFrame(f *testing.F) {
	f.Add(AppendReply(nil, ReplyOK, ""))
	f.Add(append(AppendReply(nil, ReplyNotHere, "gone"), "stream"...))
	f.Add([]byte{byte(FrameReply), 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		body, err := ReadFrame(r, FrameReply)
		if err != nil {
			return
		}
		if len(body) == 0 || len(body) > 1+maxReason || len(b)-r.Len() != HeaderSize+len(body) {
			t.Fatalf("of %d bytes it took %d for a body of %d", len(b), len(b)-r.Len(), len(body))
		}
	})
}
