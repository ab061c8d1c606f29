package relaytest

import (
	"net"
	"slices"
	"testing"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
)

// TwoInARow are two relays whose nodes can reach each other, as agents that relay are.
func TwoInARow(t *testing.T, m *Members) (r1, r2 *Relay, pool1 *client.Pool) {
	t.Helper()
	all, pools := InARow(t, m, 2)
	return all[0], all[1], pools[0]
}

// InARow are relays whose nodes can all reach each other.
func InARow(t *testing.T, m *Members, n int, change ...func(*server.Config)) ([]*Relay, []*client.Pool) {
	t.Helper()
	all, pools := make([]*Relay, n), make([]*client.Pool, n)
	isRelay := func(id identity.ID) bool {
		return slices.ContainsFunc(all, func(r *Relay) bool { return r.Key.ID() == id })
	}
	for i := range all {
		all[i] = StartRelay(t, m, append(change, func(c *server.Config) {
			c.Relay = isRelay
			c.Forward = func(relay, origin, node identity.ID, channel byte, b []byte) bool {
				return pools[i].Forward(relay, origin, node, channel, b)
			}
		})...)
		m.Allow(all[i].Key.ID())
	}
	var list []client.Relay
	for _, r := range all {
		list = append(list, r.Entry())
	}
	for i, r := range all {
		noWay := func(far, origin, node identity.ID) {
			r.NoWays.Add(1)
			r.Server.NoWay(far, origin, node)
		}
		pools[i] = client.NewPool(client.PoolConfig{Self: r.Key.ID(), Key: r.Key, OnNoWay: noWay})
		t.Cleanup(func() { pools[i].Close() })
		pools[i].SetRelays(list)
	}
	return all, pools
}

// Unreachable is a relay as a node sees it that cannot connect to it.
func Unreachable(t *testing.T, r *Relay) client.Relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	return client.Relay{ID: r.Key.ID(), Addresses: []string{l.Addr().String()}, Key: r.Key.Public()}
}
