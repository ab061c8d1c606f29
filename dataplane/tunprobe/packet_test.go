package tunprobe

import (
	"encoding/binary"
	"net/netip"
	"testing"
)

func TestParseTarget(t *testing.T) {
	for _, s := range []string{"icmp:192.0.2.1", "icmp:2001:db8::1", "tcp:192.0.2.1:80", "tcp:[2001:db8::1]:80"} {
		if got, err := ParseTarget(s); err != nil || got.String() != s {
			t.Errorf("%s: %s: %v", s, got, err)
		}
	}
	for _, s := range []string{"", "192.0.2.1", "udp:192.0.2.1:53", "icmp:", "icmp:192.0.2.1:80", "tcp:192.0.2.1",
		"tcp:192.0.2.1:0", "tcp:192.0.2.1:65536",
		"icmp:0.0.0.0", "icmp:127.0.0.1", "icmp:224.0.0.1", "icmp:fe80::1", "icmp:fe80::1%eth0", "icmp:::ffff:192.0.2.1",
		"icmp:name", "tcp:2001:db8::1:80"} {
		if got, err := ParseTarget(s); err == nil {
			t.Errorf("%q: %+v", s, got)
		}
	}
}

var (
	key4 = key{netip.MustParseAddr("169.254.102.1"), netip.MustParseAddr("192.0.2.10"), 80, 40000}
	key6 = key{netip.MustParseAddr("fd73:6b65:696e:6568::1"), netip.MustParseAddr("2001:db8::10"), 80, 40000}
)

// turn makes the same key as the target would send with.
func turn(k key) key { return key{k.target, k.source, k.id, k.port} }

// reply makes an echo's answer of the probe.
func reply(k key, nonce uint64) []byte {
	b := echo(key{k.target, k.source, 0, k.id}, nonce)
	b[len(b)-echoLen] = icmpOf(k.target).reply
	return b
}

// problem makes an ICMP error about a packet.
func problem(k key, about []byte) []byte {
	types := icmpOf(k.target)
	return packet(key{source: k.target, target: k.source}, types.proto,
		append([]byte{types.unreachable, 3, 0, 0, 0, 0, 0, 0}, about...))
}

func TestAnswers(t *testing.T) {
	for _, k := range []key{key4, key6} {
		ping := k
		ping.port = 0
		head := ip4Len
		if k.source.Is6() {
			head = ip6Len
		}
		syn := segment(k, flagSYN, 1000)
		ack := func(flags byte, n uint32) []byte {
			b := segment(turn(k), flags, 7)
			binary.BigEndian.PutUint32(b[head+8:], n)
			return b
		}
		for _, c := range []struct {
			what   string
			packet []byte
			want   answer
			ok     bool
		}{
			{"SYN-ACK", ack(flagSYN|flagACK, 1001), answer{key: k, nonce: 1000, ack: 1001, synAck: true}, true},
			{"SYN-ACK of the last number", ack(flagSYN|flagACK, 0), answer{key: k, nonce: 1<<32 - 1, synAck: true}, true},
			{"reset", ack(flagRST|flagACK, 1001), answer{key: k, nonce: 1000, ack: 1001}, true},
			{"reset of nothing", ack(flagRST, 0), answer{}, false},
			{"data", ack(flagACK, 1001), answer{}, false},
			{"echo reply", reply(ping, 99), answer{key: ping, nonce: 99}, true},
			{"own echo", echo(ping, 99), answer{}, false},
			{"unreachable port", problem(k, syn), answer{key: k, problem: icmpOf(k.target).unreachable, code: 3}, true},
			{"unreachable, cut short", problem(k, syn[:head+8]), answer{key: k, problem: icmpOf(k.target).unreachable,
				code: 3}, true},
			{"unreachable, cut shorter", problem(k, syn[:head+7]), answer{}, false},
			{"unreachable echo", problem(ping, echo(ping, 99)), answer{key: ping, problem: icmpOf(k.target).unreachable,
				code: 3}, true},
			{"of another's packet", problem(k, segment(turn(k), flagSYN, 1)), answer{}, false},
		} {
			got, ok := parse(c.packet)
			if ok != c.ok || ok && got != c.want {
				t.Errorf("%s from %s: %+v %v", c.what, k.target, got, ok)
			}
			for n := range c.packet {
				if got, ok := parse(c.packet[:n]); ok {
					t.Fatalf("%s cut to %d bytes: %+v", c.what, n, got)
				}
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, k := range []key{key4, key6} {
		f.Add(reply(k, 1))
		f.Add(segment(k, flagSYN|flagACK, 2))
		f.Add(problem(k, segment(k, flagSYN, 3)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, ok := parse(b); ok && (!a.source.IsValid() || a.source.Is4() != a.target.Is4()) {
			t.Fatalf("%+v", a)
		}
	})
}
