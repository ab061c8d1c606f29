package kube

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip/candidate/resolve"
	"github.com/skeinmesh/skein/internal/addr"
)

// Prefix begins the names of skein's own annotations.
const Prefix = events.KubernetesPrefix

// Other systems' names for the same, which count where skein's own is absent.
const (
	kiloPrefix       = "kilo.squat.ai/"
	wireKubeEndpoint = "wirekube.io/endpoint"
	regionLabel      = "topology.kubernetes.io/region"
)

// maxSite is how long a site's name may be, in bytes, as records have it.
const maxSite = 64

// wishKeys are the annotations that say how this host is to be reached, most important first in each line.
var wishKeys = []struct {
	names []string
	take  func(w *part.Wishes, value string) error
}{
	{[]string{Prefix + "location", kiloPrefix + "location"}, parseSite},
	{[]string{Prefix + "leader", kiloPrefix + "leader"}, parseLeader},
	{[]string{Prefix + "force-internal-ip", kiloPrefix + "force-internal-ip"}, parseInternalIP},
	{
		[]string{Prefix + "force-endpoint", kiloPrefix + "force-endpoint", Prefix + "endpoint", wireKubeEndpoint},
		parseEndpoint,
	},
	{[]string{Prefix + "persistent-keepalive", kiloPrefix + "persistent-keepalive"}, parseKeepalive},
	{[]string{Prefix + "birthday-attack"}, parseBirthday},
}

// relevantAnnotation tells whether a Node's annotation is kept. The record is dealt with apart.
func relevantAnnotation(name string) bool {
	return slices.ContainsFunc(wishKeys, func(k struct {
		names []string
		take  func(*part.Wishes, string) error
	}) bool {
		return slices.Contains(k.names, name)
	})
}

// A Rubbish is an annotation that cannot be used.
type Rubbish struct {
	Name    string
	Problem string
}

// Check reads what a Node's annotations and labels would wish for its host, for those who look before they move here.
func Check(annotations, labels map[string]string) (part.Wishes, []Rubbish) {
	return wishesOf(annotations, labels)
}

// wishesOf reads what a Node's annotations and labels wish for its host. What cannot be used is left out and told.
func wishesOf(annotations, labels map[string]string) (w part.Wishes, bad []Rubbish) {
	if region := labels[regionLabel]; region != "" {
		if err := parseSite(&w, region); err != nil {
			bad = append(bad, Rubbish{regionLabel, err.Error()})
		}
	}
	for _, k := range wishKeys {
		for _, name := range k.names {
			value, ok := annotations[name]
			if !ok {
				continue
			}
			if err := k.take(&w, strings.TrimSpace(value)); err != nil {
				bad = append(bad, Rubbish{name, err.Error()})
				continue // another system's name for the same may be usable
			}
			break
		}
	}
	return w, bad
}

func parseSite(w *part.Wishes, value string) error {
	if len(value) > maxSite || strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("%.80q is not a name of a site: want at most %d printable characters", value, maxSite)
	}
	w.Site = value
	return nil
}

func parseLeader(w *part.Wishes, value string) error {
	switch value {
	case "", "true":
		w.Leader = true
	case "false":
	default:
		return fmt.Errorf("%.80q: want true, or false, or nothing for true", value)
	}
	return nil
}

// isNone reports whether a value asks for nothing, as Kilo has it.
func isNone(value string) bool { return value == "" || value == "-" }

func parseInternalIP(w *part.Wishes, value string) (err error) {
	w.InternalIP, err = addr.Internal(value)
	return err
}

func parseEndpoint(w *part.Wishes, value string) error {
	if isNone(value) {
		return nil
	}
	host, _, err := resolve.Split(value, "")
	if err == nil && len(host) > 253 {
		err = fmt.Errorf("the name has %d characters", len(host))
	}
	if err != nil ||
		strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) || unicode.IsSpace(r) }) {
		return fmt.Errorf(
			"%.80q: want host:port, such as 192.0.2.7:51820, [2001:db8::7]:51820 or edge.example.com:51820",
			value,
		)
	}
	w.ForceEndpoint = value
	return nil
}

// maxKeepalive is as the configuration has it, in seconds.
const maxKeepalive = 3600

func parseKeepalive(w *part.Wishes, value string) error {
	if isNone(value) {
		return nil
	}
	n, err := strconv.ParseUint(value, 10, 16)
	if err != nil || n > maxKeepalive {
		return fmt.Errorf("%.80q: want seconds, 0 to %d", value, maxKeepalive)
	}
	w.PersistentKeepalive = uint32(n)
	return nil
}

func parseBirthday(w *part.Wishes, value string) error {
	if value != "enabled" && value != "disabled" {
		return fmt.Errorf("%.80q: want enabled or disabled", value)
	}
	w.BirthdayAttack = value
	return nil
}
