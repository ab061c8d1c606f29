package events

import (
	"cmp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// withDefaults is a copy with the defaults of state.proto in place of zeros.
func withDefaults(v *skeinv1.Settings) *skeinv1.Settings {
	out := &skeinv1.Settings{}
	if v != nil {
		out = proto.CloneOf(v)
	}
	out.HandshakeTimeoutSeconds = cmp.Or(out.HandshakeTimeoutSeconds, 30)
	out.DirectRetryIntervalSeconds = cmp.Or(out.DirectRetryIntervalSeconds, 120)
	out.PersistentKeepaliveSeconds = cmp.Or(out.PersistentKeepaliveSeconds, 25)
	out.BirthdayAttack = cmp.Or(out.BirthdayAttack, "disabled")
	out.Stun = cmp.Or(out.Stun, "enabled")
	out.ArchiveMaxEvents = cmp.Or(out.ArchiveMaxEvents, 1_000_000)
	out.Topology = cmp.Or(out.Topology, "full")
	out.LeadersPerSite = cmp.Or(out.LeadersPerSite, 2)
	out.FouPort = cmp.Or(out.FouPort, defaultFoUPort)
	out.ArchiveMaxBytes = cmp.Or(out.ArchiveMaxBytes, 256<<20)
	return out
}

func checkSettings(v *skeinv1.Settings) error {
	for _, r := range []struct {
		name           string
		value          uint64
		lowest, utmost uint64
	}{
		{"handshake_timeout_seconds", uint64(v.GetHandshakeTimeoutSeconds()), 1, 3600},
		{"direct_retry_interval_seconds", uint64(v.GetDirectRetryIntervalSeconds()), 1, 86_400},
		{"persistent_keepalive_seconds", uint64(v.GetPersistentKeepaliveSeconds()), 1, 65_535},
		{"fou_port", uint64(v.GetFouPort()), 1, 65_535},
		{"archive_max_events", v.GetArchiveMaxEvents(), 1000, 1e9},
		{"archive_max_age_seconds", v.GetArchiveMaxAgeSeconds(), 60, 100 * 365 * 86_400},
		{"archive_max_bytes", v.GetArchiveMaxBytes(), 1 << 20, 1 << 40},
	} {
		if r.value != 0 && (r.value < r.lowest || r.value > r.utmost) {
			return refuse(InvalidArgument, "setting %s: %d is out of range; use %d to %d, or 0 for the default", r.name, r.value,
				r.lowest, r.utmost)
		}
	}
	if what := ownPorts[v.GetFouPort()]; what != "" {
		return refuse(InvalidArgument, "setting fou_port: %d is the port of %s: choose another", v.GetFouPort(), what)
	}
	switch v.GetBirthdayAttack() {
	case "", "enabled", "disabled":
	default:
		return refuse(InvalidArgument, "setting birthday_attack: %q is not allowed; use enabled or disabled",
			v.GetBirthdayAttack())
	}
	if err := checkStun(v); err != nil {
		return err
	}
	if err := checkTopology(v); err != nil {
		return err
	}
	return checkPodRanges(v.GetPodRanges())
}

// mergeSettings is a copy of old with the named fields of v, or with all of them if none is named.
func mergeSettings(old, v *skeinv1.Settings, names []string) (*skeinv1.Settings, error) {
	if len(names) == 0 {
		return proto.CloneOf(v), nil
	}
	out := &skeinv1.Settings{}
	if old != nil {
		out = proto.CloneOf(old)
	}
	fields := out.ProtoReflect().Descriptor().Fields()
	for _, name := range names {
		f := fields.ByName(protoreflect.Name(name))
		if f == nil {
			var allowed []string
			for i := range fields.Len() {
				allowed = append(allowed, string(fields.Get(i).Name()))
			}
			slices.Sort(allowed)
			return nil, refuse(InvalidArgument, "setting %.80q does not exist; there are %s", name, strings.Join(allowed, ", "))
		}
		if !v.ProtoReflect().Has(f) {
			out.ProtoReflect().Clear(f)
			continue
		}
		out.ProtoReflect().Set(f, v.ProtoReflect().Get(f))
	}
	return out, nil
}

// maxStunServers bounds the setting; a few are asked at a time.
const maxStunServers = 16

func checkStun(v *skeinv1.Settings) error {
	switch v.GetStun() {
	case "", "enabled", "disabled":
	default:
		return refuse(InvalidArgument, "setting stun: %.80q is not allowed; use enabled or disabled", v.GetStun())
	}
	all := v.GetStunServers()
	if len(all) > maxStunServers {
		return refuse(InvalidArgument, "setting stun_servers: %d servers are too many; use up to %d",
			len(all), maxStunServers)
	}
	for i, server := range all {
		if !isEndpoint(server) {
			return refuse(InvalidArgument, "setting stun_servers: %.80q: want host:port, such as stun.example.net:3478", server)
		}
		if slices.Contains(all[:i], server) {
			return refuse(InvalidArgument, "setting stun_servers: %.80q is there twice", server)
		}
	}
	return nil
}
