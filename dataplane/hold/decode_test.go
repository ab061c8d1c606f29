package hold

import (
	"testing"

	"github.com/skeinmesh/skein/internal/nfnl"
)

func FuzzDecode(f *testing.F) {
	var w nfnl.Writer
	w.Bytes(packetHeader, []byte{0, 0, 0, 9, 8, 0, 0})
	w.Uint32(attrMark, 4)
	f.Add(w.B)
	f.Fuzz(func(t *testing.T, b []byte) { decode(b) })
}
