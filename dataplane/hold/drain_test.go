package hold

import (
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/skeinmesh/skein/internal/testns"
)

// TestWhatCameIsNotLeftBehind lets the time of Close end before the reader has seen arrived packets: they are
// released nevertheless. On a busy machine the last packets of a hold were once lost.
func TestWhatCameIsNotLeftBehind(t *testing.T) {
	const number, port, packets = 5118, 9000, 200
	n := testns.New(t, "drain")
	var q *Queue
	var to *net.UDPConn
	n.Must("a queue before a socket", func() (err error) {
		if q, err = Open("", number, slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
		for _, f := range Forms() {
			if err = queueAll(f.Statement(number)); err == nil {
				break
			}
		}
		if err != nil {
			return err
		}
		to, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:9000")))
		return err
	})
	defer q.Close()
	defer to.Close()
	if _, err := q.Release(); err != nil {
		t.Fatal(err)
	}
	q.mu.Lock()     // the reader gets no further than to the end of its time
	q.closed = true // as Close does
	if err := q.c.Deadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	n.Must("send", func() error {
		from, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			return err
		}
		defer from.Close()
		for range packets {
			if _, err := from.Write([]byte("x")); err != nil {
				return err
			}
		}
		return nil
	})
	q.mu.Unlock()
	<-q.done
	got, b := 0, make([]byte, 10)
	for ; got < packets; got++ {
		_ = to.SetReadDeadline(time.Now().Add(2 * time.Second))
		if _, err := to.Read(b); err != nil {
			break
		}
	}
	if got != packets {
		t.Errorf("%d of %d packets came", got, packets)
	}
}

// queueAll gives all leaving packets to a queue.
func queueAll(queue expr.Any) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "drain"})
	chain := c.AddChain(&nftables.Chain{Name: "out", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityLast})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{queue}})
	return c.Flush()
}
