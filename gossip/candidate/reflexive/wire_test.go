package reflexive

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/internal/nattest"
)

func TestServerOnTheWire(t *testing.T) {
	internet := nattest.New(t)
	host := internet.Host(nattest.Public)
	var asked atomic.Int64
	release := make(chan struct{})
	var s *stunserver.Server
	fresh := map[string]*freshSocket{}
	host.Do(func() {
		var err error
		s, err = stunserver.Listen(stunserver.Config{Port: 3478, Mark: 0x20, ChangeIP: func(ctx context.Context,
			_ netip.AddrPort, _ [12]byte) error {
			asked.Add(1)
			select {
			case <-release:
			case <-ctx.Done():
			}
			return errors.New("nobody else here")
		}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		for _, network := range []string{"udp4", "udp6"} {
			f, err := openFresh(network, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(f.close)
			fresh[network] = f
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for network, at := range map[string]netip.Addr{"udp4": host.Addr, "udp6": host.Addr6} {
		r, _, err := fresh[network].ask(ctx, netip.AddrPortFrom(at, 3478), stunmsg.Here)
		if err != nil || r.Other != netip.AddrPortFrom(at, 3479) || r.Mapped.Addr() != at {
			t.Errorf("%s: %+v, %v", network, r, err)
		}
		for w, ports := range map[stunmsg.Want]string{stunmsg.OtherPort: "3479", stunmsg.SilentPort: ""} {
			r, _, err := fresh[network].ask(ctx, netip.AddrPortFrom(at, 3478), w)
			if err != nil || r.From.Addr() != at || r.From.Port() == 3478 || ports == "" && r.From.Port() == 3479 {
				t.Errorf("%s, wish %d: from %s, %v", network, w, r.From, err)
			}
		}
	}
	// The question is repeated while the other node is being asked, and asked of it once.
	time.AfterFunc(400*time.Millisecond, func() { close(release) })
	if _, _, err := fresh["udp4"].ask(ctx, netip.AddrPortFrom(host.Addr, 3478), stunmsg.OtherAddress); !errors.Is(err,
		errUnsupported) {
		t.Errorf("another address was wished for: %v", err)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the other node was asked %d times, want once", n)
	}
	for _, bad := range []string{"127.0.0.1:1", "224.0.0.1:1", "203.0.113.9:0", "[::]:1"} {
		if err := s.Answer(ap(bad), [12]byte{}, false); err == nil {
			t.Errorf("answered to %s", bad)
		}
	}
	limited := false
	for range 80 {
		limited = s.Answer(ap("203.0.113.200:9"), [12]byte{}, false) != nil || limited
	}
	if !limited {
		t.Error("answers for other nodes are not limited")
	}
}
