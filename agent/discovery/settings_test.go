package discovery

import (
	"slices"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// The host's word comes before the cluster's, that before the mesh's own servers; switched off, nobody is asked.
func TestStunServers(t *testing.T) {
	mesh := []string{"198.51.100.1:3478"}
	host := func(stun string, servers ...string) config.Config {
		return config.Config{StunServers: servers, NatTraversal: config.NatTraversal{Stun: stun}}
	}
	cluster := func(stun string, servers ...string) *skeinv1.Settings {
		return &skeinv1.Settings{Stun: stun, StunServers: servers}
	}
	for name, c := range map[string]struct {
		host    config.Config
		cluster *skeinv1.Settings
		want    []string
	}{
		"nothing said":                        {host(""), cluster("enabled"), mesh},
		"the cluster's":                       {host(""), cluster("enabled", "a:1"), []string{"a:1"}},
		"the host's":                          {host("", "b:1"), cluster("enabled", "a:1"), []string{"b:1"}},
		"off in the cluster":                  {host("", "b:1"), cluster("disabled", "a:1"), nil},
		"off in the cluster, on at this host": {host("enabled"), cluster("disabled", "a:1"), []string{"a:1"}},
		"off at this host":                    {host("disabled", "b:1"), cluster("enabled", "a:1"), nil},
		"a cluster of an older version":       {host(""), cluster(""), mesh},
	} {
		if have := StunServers(c.host, c.cluster, mesh); !slices.Equal(have, c.want) {
			t.Errorf("%s: %v, want %v", name, have, c.want)
		}
	}
}
