package stunmsg

import (
	"net/netip"
	"testing"
)

func FuzzDecodeResponse(f *testing.F) {
	four, six := netip.MustParseAddrPort("203.0.113.1:3478"), netip.MustParseAddrPort("[2001:db8::1]:3478")
	for _, a := range []netip.AddrPort{four, six} {
		b, err := Success(TxID{1}, a)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, w := range []Want{Here, OtherPort, OtherAddress, SilentPort} {
		b, err := EncodeRequest(TxID{1}, w)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, from := range []netip.AddrPort{four, six} {
			r, err := DecodeResponse(b, from)
			if err == nil && r.Code == 0 && (r.Mapped.Addr().Is4() != from.Addr().Is4() || !r.Mapped.Addr().IsGlobalUnicast() ||
				r.Mapped.Port() == 0) {
				t.Fatalf("believed %s from %s", r.Mapped, from)
			}
		}
		if n := Len(b); n > len(b) {
			t.Fatalf("a message of %d bytes in %d", n, len(b))
		}
	})
}
