package consensus

import (
	"log/slog"
	"net"
	"testing"
	"testing/synctest"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/identity"
)

// A server that stops closes its files after its transport: a heartbeat that Raft is still handling may write a term
// there.
func TestCloseWaitsForHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		n := newInbound(identity.ID{1}, in, func(identity.ID) error { return nil }, raft.NetworkTransportConfig{},
			slog.New(slog.DiscardHandler))
		begun, end, taken := make(chan struct{}), make(chan struct{}), 0
		n.setHeartbeat(func(raft.RPC) {
			taken++
			close(begun)
			<-end
		})
		go n.handleHeartbeat(raft.RPC{})
		<-begun
		closed := make(chan error, 1)
		go func() { closed <- n.Close() }()
		synctest.Wait()
		select {
		case <-closed:
			t.Error("closed while a heartbeat was being taken in")
		default:
		}
		close(end)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if n.handleHeartbeat(raft.RPC{}); taken != 1 {
			t.Errorf("%d heartbeats were taken in, one of them after the end", taken)
		}
	})
}
