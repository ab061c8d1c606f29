package announce

import (
	"bytes"
	"net/netip"
	"testing"

	"golang.org/x/net/bpf"
)

var (
	me, other = mac{2, 0, 0, 0, 0, 1}, mac{2, 0, 0, 0, 0, 2}
	v4, v6    = netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8:2::99")
	peer4     = netip.MustParseAddr("192.0.2.10")
	peer6     = netip.MustParseAddr("2001:db8:2::10")
)

func TestLinkFor(t *testing.T) {
	p := netip.MustParsePrefix
	links := []Link{
		{"wan", []netip.Prefix{p("192.0.2.0/24"), p("2001:db8::/32")}},
		{"lan", []netip.Prefix{p("192.0.2.64/26"), p("10.0.0.7/8")}},
		{"lo", []netip.Prefix{p("192.0.2.99/32"), p("2001:db8:2::99/128")}},
		{"second", []netip.Prefix{p("192.0.2.0/24")}},
	}
	for addr, want := range map[string]string{
		"192.0.2.1": "wan", "192.0.2.99": "lan", "10.9.9.9": "lan", "2001:db8:2::99": "wan", "::ffff:192.0.2.1": "wan",
		"198.51.100.1": "", "fd00::1": "",
	} {
		if got, ok := LinkFor(netip.MustParseAddr(addr), links); ok != (want != "") || ok && got != want {
			t.Errorf("%s: %q %v, not %q", addr, got, ok, want)
		}
	}
}

// ask makes the solicitation of a host that wants to send.
func ask(from mac, sender, target netip.Addr) []byte {
	b := target.As16()
	nd := append([]byte{solicit, 0, 0, 0, 0, 0, 0, 0}, b[:]...)
	nd = append(append(nd, sourceMAC, 1), from[:]...)
	return icmp(groupMAC(solicitedNode(target)), from, sender, solicitedNode(target), nd)
}

func TestFramesAreReadAsWritten(t *testing.T) {
	for _, c := range []struct {
		what  string
		frame []byte
		want  message
	}{
		{"ARP request", arp(arpRequest, broadcast, other, peer4, mac{}, v4), message{other, peer4, v4, true}},
		{"ARP probe", probe(other, v4), message{other, netip.IPv4Unspecified(), v4, true}},
		{"ARP reply", arp(arpReply, me, other, peer4, me, v4), message{other, peer4, peer4, false}},
		{"gratuitous request", announcement(other, v4)[0], message{other, v4, v4, true}},
		{"gratuitous reply", announcement(other, v4)[1], message{other, v4, v4, false}},
		{"solicitation", ask(other, peer6, v6), message{other, peer6, v6, true}},
		{"IPv6 probe", probe(other, v6), message{other, netip.IPv6Unspecified(), v6, true}},
		{"unsolicited advertisement", announcement(other, v6)[0], message{other, v6, v6, false}},
		{"ARP answer", answer(other, message{me, peer4, v4, true}), message{other, v4, v4, false}},
		{"advertisement", answer(other, message{me, peer6, v6, true}), message{other, v6, v6, false}},
		{"advertisement to a probe", answer(other, message{me, netip.IPv6Unspecified(), v6, true}),
			message{other, v6, v6, false}},
	} {
		parse := parseARP
		if c.want.target.Is6() {
			parse = parseND
		}
		if got, ok := parse(c.frame); !ok || got != c.want {
			t.Errorf("%s: %+v %v", c.what, got, ok)
		}
		for n := range c.frame {
			if _, ok := parse(c.frame[:n]); ok {
				t.Errorf("%s: read of %d bytes of %d", c.what, n, len(c.frame))
			}
		}
	}
}

func TestForgedSolicitationsAreNotRead(t *testing.T) {
	for what, change := range map[string]func([]byte){
		"forwarded":        func(b []byte) { b[etherLen+7] = 254 },
		"checksum":         func(b []byte) { b[len(b)-1]++ },
		"code":             func(b []byte) { b[etherLen+ipv6Len+1] = 1 },
		"empty option":     func(b []byte) { b[etherLen+ipv6Len+ndLen+1] = 0 },
		"long option":      func(b []byte) { b[etherLen+ipv6Len+ndLen+1] = 2 },
		"redirect":         func(b []byte) { b[etherLen+ipv6Len] = 137 },
		"more than it has": func(b []byte) { b[etherLen+5]++ },
		"multicast MAC":    func(b []byte) { b[len(b)-6] |= 1 },
	} {
		b := ask(other, peer6, v6)
		change(b)
		if what != "checksum" && what != "forwarded" && what != "more than it has" {
			nd := b[etherLen+ipv6Len:]
			nd[2], nd[3] = 0, 0
			sum := checksum(b[etherLen+8:etherLen+24], b[etherLen+24:etherLen+40], nd)
			nd[2], nd[3] = byte(sum>>8), byte(sum)
		}
		if m, ok := parseND(b); ok {
			t.Errorf("%s: read as %+v", what, m)
		}
	}
}

func TestFilter(t *testing.T) {
	raw, err := ndFilter()
	if err != nil {
		t.Fatal(err)
	}
	program, ok := bpf.Disassemble(raw)
	if !ok {
		t.Fatal("the filter cannot be read")
	}
	vm, err := bpf.NewVM(program)
	if err != nil {
		t.Fatal(err)
	}
	udp, far := ask(other, peer6, v6), ask(other, peer6, v6)
	udp[etherLen+6], far[etherLen+7] = 17, 64
	echo := ask(other, peer6, v6)
	echo[etherLen+ipv6Len] = 128
	for _, c := range []struct {
		what  string
		frame []byte
		pass  bool
	}{
		{"solicitation", ask(other, peer6, v6), true},
		{"advertisement", announcement(other, v6)[0], true},
		{"UDP", udp, false},
		{"forwarded", far, false},
		{"echo", echo, false},
	} {
		if n, err := vm.Run(c.frame); err != nil || (n > 0) != c.pass {
			t.Errorf("%s: %d bytes pass: %v", c.what, n, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(announcement(other, v4)[0])
	f.Add(announcement(other, v6)[0])
	f.Add(ask(other, peer6, v6))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, parse := range []func([]byte) (message, bool){parseARP, parseND} {
			m, ok := parse(b)
			if !ok || !m.asks {
				continue
			}
			if multicast(m.from) {
				t.Fatal("from a group")
			}
			a := answer(me, m)
			if got, ok := parse(a); !ok || got.from != me || got.target != m.target || !bytes.Equal(a[6:12], me[:]) {
				t.Fatalf("answer to %+v: %+v %v", m, got, ok)
			}
		}
	})
}
