package relay

import (
	"bytes"
	"testing"
)

// FuzzReadFrame reads the answer that precedes a spliced stream: one frame, and not a byte of the stream.
func FuzzReadFrame(f *testing.F) {
	f.Add(appendReply(nil, replyOK, ""))
	f.Add(append(appendReply(nil, replyNotHere, "gone"), "stream"...))
	f.Add([]byte{byte(frameReply), 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		body, err := readFrame(r, frameReply)
		if err != nil {
			return
		}
		if len(body) == 0 || len(body) > 1+maxReason || len(b)-r.Len() != headerSize+len(body) {
			t.Fatalf("of %d bytes it took %d for a body of %d", len(b), len(b)-r.Len(), len(body))
		}
	})
}
