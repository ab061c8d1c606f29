package owners

import (
	"net/netip"
	"testing"
)

// frame makes one by hand.
func frame(source string, proto byte, port uint16) []byte {
	a := netip.MustParseAddr(source)
	b := append([]byte{1, 1, 1, 1, 1, 1}, 2, 2, 2, 2, 2, 2)
	if a.Is4() {
		ip := make([]byte, ipv4Header)
		ip[0], ip[9] = 0x45, proto
		copy(ip[12:], a.AsSlice())
		b = append(append(b, 0x08, 0x00), ip...)
	} else {
		ip := make([]byte, ipv6Header)
		ip[0], ip[6] = 0x60, proto
		copy(ip[8:], a.AsSlice())
		b = append(append(b, 0x86, 0xdd), ip...)
	}
	return append(b, 0, 1, byte(port>>8), byte(port))
}

func TestDecode(t *testing.T) {
	for _, c := range []struct {
		source string
		proto  byte
	}{{"198.18.1.9", protoUDP}, {"2001:db8::9", protoTCP}} {
		f, ok := Decode(frame(c.source, c.proto, 8080))
		if want := (Frame{[6]byte{2, 2, 2, 2, 2, 2}, netip.MustParseAddr(c.source), c.proto, 8080}); !ok || f != want {
			t.Errorf("%+v %v, want %+v", f, ok, want)
		}
	}
	options := frame("198.18.1.9", protoUDP, 0x1234)
	options[etherHeader] = 0x46
	options = append(options, 0, 7, 0, 80)
	if f, ok := Decode(options); !ok || f.Port != 7 && f.Port != 80 {
		t.Errorf("with options: %+v %v", f, ok)
	}
	later := frame("198.18.1.9", protoUDP, 80)
	later[etherHeader+7] = 1
	whole := frame("198.18.1.9", protoUDP, 80)
	for name, b := range map[string][]byte{"a later fragment": later, "ICMP": frame("198.18.1.9", 1, 0),
		"ARP": append(make([]byte, 12), 0x08, 0x06, 0, 1), "empty": nil,
		"cut short": whole[:len(whole)-1], "IPv6 in a frame for IPv4": append(append(make([]byte, 12), 0x08, 0),
			frame("::1", 6, 1)[14:]...)} {
		if f, ok := Decode(b); ok {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// FuzzDecode: whatever is captured, nothing is read beyond it.
func FuzzDecode(f *testing.F) {
	f.Add(frame("198.18.1.9", protoUDP, 80))
	f.Add(frame("2001:db8::9", protoTCP, 80))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, ok := Decode(b); ok && (!got.Source.IsValid() || len(b) < etherHeader+ipv4Header+portsSize) {
			t.Errorf("%+v of %d bytes", got, len(b))
		}
	})
}
