package relay

import (
	"net"
	"slices"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

// farRelays are two relays whose nodes can reach each other, as agents that relay are.
func farRelays(t *testing.T, m *members) (r1, r2 *testRelay, pool1 *Pool) {
	t.Helper()
	all, pools := relaysInARow(t, m, 2)
	return all[0], all[1], pools[0]
}

// relaysInARow are relays whose nodes can all reach each other.
func relaysInARow(t *testing.T, m *members, n int, change ...func(*ServerConfig)) ([]*testRelay, []*Pool) {
	t.Helper()
	all, pools := make([]*testRelay, n), make([]*Pool, n)
	isRelay := func(id identity.ID) bool {
		return slices.ContainsFunc(all, func(r *testRelay) bool { return r.key.ID() == id })
	}
	for i := range all {
		all[i] = startRelay(t, m, append(change, func(c *ServerConfig) {
			c.Relay = isRelay
			c.Forward = func(relay, origin, node identity.ID, channel byte, b []byte) bool {
				return pools[i].Forward(relay, origin, node, channel, b)
			}
		})...)
		m.allow(all[i].key.ID())
	}
	var list []Relay
	for _, r := range all {
		list = append(list, r.relay())
	}
	for i, r := range all {
		pools[i] = NewPool(PoolConfig{Self: r.key.ID(), Key: r.key, OnNoWay: func(far, origin, node identity.ID) {
			r.noWays.Add(1)
			r.server.NoWay(far, origin, node)
		}})
		t.Cleanup(func() { pools[i].Close() })
		pools[i].SetRelays(list)
	}
	return all, pools
}

// unreachable is a relay as a node sees it that cannot connect to it.
func unreachable(t *testing.T, r *testRelay) Relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	return Relay{ID: r.key.ID(), Addresses: []string{l.Addr().String()}, Key: r.key.Public()}
}
