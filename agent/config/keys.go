package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Class says what a changed value of a key does to an agent that runs.
type Class string

// Classes of keys.
const (
	Live    Class = "live"    // it takes effect at once
	Restart Class = "restart" // it takes effect at the agent's next start
	// Agreed keys are read while the node joins, or the cluster is made. What they said then is agreed state: neither a
	// reload nor a restart changes it, a command does.
	Agreed Class = "agreed"
)

// Key is one key of the file, with dots between its parts.
type Key struct {
	Name  string
	Class Class
	Why   string // of Restart and Agreed: why the value is not taken at once, and what changes it
}

const (
	peersPort = "peers, routers and the data plane hold the port; a listener that moves would cut what runs over it"
	owned     = "the agent tells others that it holds these numbers when it starts, and then removes what others left"
	atOpening = "the kernel objects that this driver has made would have to be made anew, and packets would be lost"
)

// Keys are all keys of the file, in its order.
var Keys = []Key{
	{"name", Agreed, "agreed when the node joins; `skein node set NAME --name NEW` changes it"},
	{"site", Live, ""},
	{"server", Agreed, "read when the node joins; `skein node grant NAME server` and `skein node withdraw NAME server` " +
		"change it"},
	{"relay", Live, ""},
	{"leader", Live, ""},
	{"labels", Live, ""},
	{"internalIP", Live, ""},
	{"forceEndpoint", Live, ""},
	{"persistentKeepalive", Live, ""},
	{"stunServers", Live, ""},
	{"nodeAddresses", Live, ""},
	{"advertise", Live, ""},
	{"routeNodeAddresses", Live, ""},
	{"natTraversal.birthdayAttack", Agreed, "read when the cluster is made; " +
		"`skein settings --birthday-attack` changes it"},
	{"natTraversal.portGuessing", Live, ""},
	{"natTraversal.portMapping", Live, ""},
	{"natTraversal.imds", Live, ""},
	{"natTraversal.stun", Live, ""},
	{"peers", Live, ""},
	{"handshakeTimeoutSeconds", Live, ""},
	{"directRetryIntervalSeconds", Live, ""},
	{"lazyPaths", Live, ""},
	{"emptyBlockSeconds", Live, ""},
	{"relayLimits.memoryMiB", Live, ""},
	{"relayLimits.clientMbit", Live, ""},
	{"relayLimits.clientPackets", Live, ""},
	{"relayLimits.clientStreams", Live, ""},
	{"relayLimits.sessions", Live, ""},
	{"egress.clients", Live, ""},
	{"kubernetes.kubeconfig", Restart, "what the agent keeps of one Kubernetes cluster must not meet another one; " +
		"the file that the key names is read anew when it changes"},
	{"kubernetes.node", Restart, "what the agent keeps of one Node must not be taken for another one's"},
	{"kubernetes.revokeAfterSeconds", Live, ""},
	{"cni.confDir", Live, ""},
	{"cni.confFile", Live, ""},
	{"cni.binDir", Live, ""},
	{"cni.network", Live, ""},
	{"cni.chain", Live, ""},
	{"ports.wireguard", Restart, peersPort},
	{"ports.stun", Restart, peersPort},
	{"ports.relayOutside", Live, ""},
	{"ports.relay", Restart, "join tokens and relay sessions hold the port"},
	{"ports.control", Restart, "the same on all nodes: gossip, Raft and calls of other nodes hold the port"},
	{"ports.plain", Restart, "plain peers' configurations hold the port"},
	{"ports.metrics", Live, ""},
	{"ports.udpRelay", Restart, "pairs of clients hold ports of the range, and the kernel's tables are made for it"},
	{"dataplane.wireguard", Restart, atOpening},
	{"dataplane.instance", Restart, owned},
	{"dataplane.link", Restart, owned},
	{"dataplane.hopLink", Restart, owned},
	{"dataplane.plainLink", Restart, owned},
	{"dataplane.nftTable", Restart, owned},
	{"dataplane.mark", Restart, owned},
	{"dataplane.tunnelMark", Restart, owned},
	{"dataplane.markMask", Restart, owned},
	{"dataplane.rule", Restart, owned},
	{"dataplane.firstRule", Restart, owned},
	{"dataplane.table", Restart, owned},
	{"dataplane.firstTable", Restart, owned},
	{"dataplane.relay", Restart, atOpening},
	{"dataplane.fou", Restart, atOpening},
	{"overlay.ipv4", Agreed, "read when the cluster is made; the addresses of all nodes are of this range"},
	{"stateDir", Restart, "the agent holds its files open there"},
	{"runDir", Restart, "the agent's sockets and lock are there"},
	{"log.level", Live, ""},
	{"log.format", Live, ""},
}

// Change is a key whose value differs between two configurations.
type Change struct {
	Key
	Old, New string // as YAML would show them in one line; empty: not set
}

// Changes are the keys in which two configurations differ, in the order of Keys. Lists and maps that are empty differ
// from ones that are absent only where an empty one has a meaning of its own, as in natTraversal.portMapping.
func Changes(from, to Config) (all []Change) {
	for _, k := range Keys {
		a, b := field(&from, k.Name), field(&to, k.Name)
		if !same(k.Name, a, b) {
			all = append(all, Change{Key: k, Old: show(a), New: show(b)})
		}
	}
	return all
}

// Adopt is the configuration that an agent which runs with one has after another one was read: its live keys are those
// of the new one, all others stay.
func Adopt(running, read Config) Config {
	for _, k := range Keys {
		if k.Class == Live {
			field(&running, k.Name).Set(field(&read, k.Name))
		}
	}
	return running
}

// emptyMeans are lists of which an empty one says something else than an absent one.
var emptyMeans = []string{"natTraversal.portMapping", "cni.chain"}

func same(key string, a, b reflect.Value) bool {
	if k := a.Kind(); k == reflect.Slice || k == reflect.Map {
		if a.Len() == 0 && b.Len() == 0 {
			return !slices.Contains(emptyMeans, key) || a.IsNil() == b.IsNil()
		}
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

// field finds a key's value by the names in the tags of c's fields. A name in Keys that is not a key is a mistake of
// the program, which TestKeys finds.
func field(c *Config, name string) reflect.Value {
	v := reflect.ValueOf(c).Elem()
	for part := range strings.SplitSeq(name, ".") {
		v = v.FieldByIndex(index(v.Type(), part))
	}
	return v
}

func index(t reflect.Type, tag string) []int {
	for _, f := range reflect.VisibleFields(t) {
		if f.Tag.Get("yaml") == tag {
			return f.Index
		}
	}
	panic(fmt.Sprintf("config.Keys names %q, which %s does not have", tag, t))
}

// show writes a value in one line, as YAML's flow style has it.
func show(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return ""
		}
		return show(v.Elem())
	case reflect.Slice:
		if v.IsNil() {
			return ""
		}
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = show(v.Index(i))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case reflect.Map:
		var parts []string
		for it := v.MapRange(); it.Next(); {
			parts = append(parts, fmt.Sprintf("%s: %s", it.Key(), show(it.Value())))
		}
		if len(parts) == 0 {
			return ""
		}
		slices.Sort(parts)
		return "{" + strings.Join(parts, ", ") + "}"
	case reflect.Struct:
		var parts []string
		for _, f := range reflect.VisibleFields(v.Type()) {
			if x := v.FieldByIndex(f.Index); !x.IsZero() {
				parts = append(parts, f.Tag.Get("yaml")+": "+show(x))
			}
		}
		return "{" + strings.Join(parts, ", ") + "}"
	}
	return fmt.Sprint(v.Interface())
}
