package journal

import (
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func FuzzDecode(f *testing.F) {
	b, err := proto.Marshal(&skeinv1.JournalEntry{Seq: 7, Time: 1,
		Body: &skeinv1.JournalEntry_AgentStarted{AgentStarted: &skeinv1.AgentStarted{Epoch: 2}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 7}, b)
	f.Add([]byte{7}, b)
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 7}, []byte{0xff})
	f.Fuzz(func(t *testing.T, k, v []byte) {
		if e, err := decode(k, v); err == nil && (len(k) != 8 || e == nil) {
			t.Fatalf("a key of %d bytes gives %v", len(k), e)
		}
	})
}
