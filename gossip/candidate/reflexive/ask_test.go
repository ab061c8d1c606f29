package reflexive

import (
	"net/netip"
	"testing"

	"github.com/pion/stun/v3"

	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
)

func request(t testing.TB, w stunmsg.Want) []byte {
	t.Helper()
	b, err := stunmsg.EncodeRequest([12]byte{1}, w)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLiesAreNotBelieved(t *testing.T) {
	server := ap("203.0.113.1:3478")
	tx := [12]byte{1}
	answer := func(mapped string) []byte {
		b, err := stunmsg.Success(tx, ap(mapped))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	mappedOnly := stun.MustBuild(stun.NewTransactionIDSetter(tx), stun.BindingSuccess,
		&stun.MappedAddress{IP: []byte{198, 51, 100, 9}, Port: 7}).Raw
	foreign, _ := stunmsg.Success([12]byte{2}, ap("198.51.100.9:1234"))
	tests := []struct {
		name string
		from netip.AddrPort
		b    []byte
		want bool
	}{
		{"the truth", server, answer("198.51.100.9:7"), true},
		{"the truth from another port", ap("203.0.113.1:3479"), answer("198.51.100.9:7"), false},
		{"the truth from another address", ap("203.0.113.2:3478"), answer("198.51.100.9:7"), false},
		{"another transaction", server, foreign, false},
		{"loopback", server, answer("127.0.0.1:7"), false},
		{"unspecified", server, answer("0.0.0.0:7"), false},
		{"multicast", server, answer("224.0.0.1:7"), false},
		{"broadcast", server, answer("255.255.255.255:7"), false},
		{"link-local", server, answer("169.254.1.1:7"), false},
		{"port 0", server, answer("198.51.100.9:0"), false},
		{"the other family", server, answer("[2001:db8::9]:7"), false},
		{"MAPPED-ADDRESS alone, which gateways rewrite", server, mappedOnly, false},
		{"an error from elsewhere", ap("203.0.113.2:3478"), stun.MustBuild(stun.NewTransactionIDSetter(tx), stun.BindingError,
			stun.CodeUnknownAttribute).Raw, false},
		{"our own question", server, request(t, stunmsg.Here), false},
		{"nothing", server, nil, false},
	}
	for _, tt := range tests {
		a := newAsker(nil)
		q := &question{to: server, answer: make(chan stunmsg.Response, 1)}
		a.waiting[tx] = q
		a.deliver(tt.from, tt.b)
		a.deliver(tt.from, tt.b) // copies do no harm
		if got := len(q.answer) == 1; got != tt.want {
			t.Errorf("%s: believed %v, want %v", tt.name, got, tt.want)
		}
	}
}

func FuzzDeliver(f *testing.F) {
	server := ap("203.0.113.1:3478")
	good, err := stunmsg.Success([12]byte{1}, ap("198.51.100.9:7"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(request(f, stunmsg.Here))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, _ := stunmsg.DecodeResponse(b, server)
		a := newAsker(nil)
		a.waiting[r.Tx] = &question{to: server, answer: make(chan stunmsg.Response, 1)}
		a.deliver(server, b)
	})
}
