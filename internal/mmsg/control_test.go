package mmsg

import (
	"net/netip"
	"testing"
)

// Whatever stands in control messages, they are read within their bounds.
func FuzzControl(f *testing.F) {
	f.Add(addSource(make([]byte, 0, controlBytes), Source{Addr: netip.MustParseAddr("127.0.0.1"), Link: 3,
		Class: 1}, false))
	f.Add(addSource(make([]byte, 0, controlBytes), Source{Addr: netip.MustParseAddr("::1"), Link: 3, Class: 1}, true))
	f.Fuzz(func(_ *testing.T, b []byte) { parseControl(b) })
}
