package probe

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/internal/inet"
	"golang.org/x/net/bpf"
)

const wgPort = 51820

func TestFilter(t *testing.T) {
	ping := NewCodec(key).EncodePing(nil, Message{Sender: alice})
	stun := append([]byte{0x01, 0x01, 0, 12, 0x21, 0x12, 0xa4, 0x42}, make([]byte, 24)...)
	indexIsCookie := []byte{4, 0, 0, 0, 0x21, 0x12, 0xa4, 0x42, 1, 2, 3}
	rtp := []byte{0x80, 1, 0, 12, 0x21, 0x12, 0xa4, 0x42, 1, 2, 3}
	tests := []struct {
		name    string
		port    uint16
		payload []byte
		want    bool
	}{
		{"ping", wgPort, ping, true},
		{"STUN answer", wgPort, stun, true},
		{"ping to another port", wgPort + 1, ping, false},
		{"STUN to another port", 3478, stun, false},
		{"WireGuard data", wgPort, append([]byte{4, 0, 0, 0, 1, 2, 3, 4}, make([]byte, 1400)...), false},
		{"WireGuard data whose index is STUN's cookie", wgPort, indexIsCookie, false},
		{"first bits are not STUN's", wgPort, rtp, false},
		{"empty", wgPort, nil, false},
		{"three bytes", wgPort, ping[:3], false},
		{"seven bytes of STUN", wgPort, stun[:7], false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			src, dst := netip.MustParseAddrPort("192.0.2.1:7"), netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), tt.port)
			udp := appendUDP(nil, src, dst, tt.payload)
			for _, options := range []int{0, 4, 40} {
				if got := passes(t, false, append(ipHeader(options, len(udp)), udp...)); got != tt.want {
					t.Errorf("IPv4 with %d bytes of options: passes %v, want %v", options, got, tt.want)
				}
			}
			if got := passes(t, true, udp); got != tt.want {
				t.Errorf("IPv6: passes %v, want %v", got, tt.want)
			}
		})
	}
}

func ipHeader(options, payload int) []byte {
	b := make([]byte, 20+options)
	b[0] = 0x40 | byte(len(b)/4)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+payload))
	b[9] = protocolUDP
	return b
}

func passes(t *testing.T, ipv6 bool, packet []byte) bool {
	t.Helper()
	raw, err := filter(wgPort, ipv6)
	if err != nil {
		t.Fatal(err)
	}
	program := make([]bpf.Instruction, len(raw))
	for i, r := range raw {
		program[i] = r.Disassemble()
	}
	vm, err := bpf.NewVM(program)
	if err != nil {
		t.Fatal(err)
	}
	n, err := vm.Run(packet)
	if err != nil {
		t.Fatal(err)
	}
	return n > 0
}

func TestChecksum(t *testing.T) {
	// A receiver sums the segment with its checksum and gets all ones.
	for n := range 64 {
		src, dst := netip.MustParseAddrPort("203.0.113.200:65535"), netip.MustParseAddrPort("10.255.255.254:3478")
		b := appendUDP(nil, src, dst, make([]byte, n))
		if n > 0 {
			b[len(b)-1] = 0xab
			binary.BigEndian.PutUint16(b[6:], 0)
			binary.BigEndian.PutUint16(b[6:], inet.UDP(src.Addr(), dst.Addr(), b))
		}
		if got := inet.UDP(src.Addr(), dst.Addr(), b); got != 0xffff {
			t.Errorf("%d bytes: the sum over the whole is %#x", n, got)
		}
	}
	// RFC 768: a sum of zero is sent as all ones. The payload makes the sum all ones.
	src, dst := netip.MustParseAddrPort("0.0.0.0:0"), netip.MustParseAddrPort("0.0.0.0:0")
	rest := uint16(0xffff - protocolUDP - 10 - 10)
	b := appendUDP(nil, src, dst, binary.BigEndian.AppendUint16(nil, rest))
	if got := binary.BigEndian.Uint16(b[6:]); got != 0xffff {
		t.Errorf("a zero checksum was sent as %#x", got)
	}
}
