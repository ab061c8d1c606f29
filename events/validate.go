package events

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
	"github.com/skeinmesh/skein/internal/dnsname"
)

// Bounds of what a command may bring into the state.
const (
	MaxName      = 63  // characters of a node's name, as of a DNS label
	MaxText      = 256 // bytes of a reason, a token's label or a request ID
	MaxLabels    = 64
	MaxLabelSum  = 4096 // bytes of all labels of a node
	MaxLabelKey  = 63   // characters
	MaxLabelText = 128

	MaxTokenLifetime = 365 * 24 * time.Hour
	MaxTokenUses     = 100_000
	MaxTokens        = 4096

	MaxVoters       = 9
	maxAcceptedKeys = 2 // older gossip keys still accepted
	minEntropy      = 32
	maxOverlayBits  = 28 // the smallest IPv4 overlay has 14 addresses
)

// DefaultOverlayIPv4 is the overlay of a cluster that asks for none.
const DefaultOverlayIPv4 = "10.4.0.0/16"

func checkOverlay(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil || !p.Addr().Is4() {
		return p, refuse(InvalidArgument, "overlay %q: it is not an IPv4 prefix; write one like %s", s, DefaultOverlayIPv4)
	}
	if p != p.Masked() {
		return p, refuse(InvalidArgument, "overlay %s: it has host bits set; write %s", s, p.Masked())
	}
	if p.Bits() > maxOverlayBits {
		return p, refuse(InvalidArgument, "overlay %s: it is too small; use a /%d or larger, it can never grow",
			s, maxOverlayBits)
	}
	if addr.Private(p) {
		return p, nil
	}
	return p, refuse(InvalidArgument, "overlay %s: it is not private; use a part of 10.0.0.0/8, 172.16.0.0/12, "+
		"192.168.0.0/16 or 100.64.0.0/10", s)
}

func checkClusterID(id string) (identity.ClusterID, error) {
	c, err := identity.ParseClusterID(id)
	if err != nil || c.String() != id || c == (identity.ClusterID{}) {
		return c, refuse(InvalidArgument, "cluster ID %q: want 32 lower-case hex digits, not all zero", id)
	}
	return c, nil
}

func checkName(name string) error {
	switch {
	case name == "":
		return refuse(InvalidArgument, "a node needs a name: set name in skein.yaml")
	case len(name) > MaxName:
		return refuse(InvalidArgument, "name %.20q… has %d characters: at most %d are allowed", name, len(name), MaxName)
	case !dnsname.IsLabel(name):
		return refuse(InvalidArgument, "name %q: use lower-case letters, digits and hyphens, with a letter or digit at "+
			"both ends", name)
	}
	if _, isID := hexKey(name); isID {
		return refuse(InvalidArgument, "name %q: 16 hex digits would be taken for a node ID; choose another name", name)
	}
	return nil
}

// checkText bounds free text, which ends up on terminals and in logs.
func checkText(what, s string, limit int) error {
	switch {
	case len(s) > limit:
		return refuse(InvalidArgument, "%s has %d bytes: at most %d are allowed", what, len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }):
		return refuse(InvalidArgument, "%s %q: only printable characters are allowed", what, s)
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return refuse(InvalidArgument, "%d labels: at most %d are allowed", len(labels), MaxLabels)
	}
	for _, k := range slices.Sorted(maps.Keys(labels)) { // sorted, so that the error is always the same
		if k == "" || len(k) > MaxLabelKey || strings.Trim(strings.ToLower(k),
			"abcdefghijklmnopqrstuvwxyz0123456789-_./") != "" {
			return refuse(InvalidArgument, "label %.80q: a key has 1 to %d letters, digits, hyphens, underscores, dots or "+
				"slashes", k, MaxLabelKey)
		}
		if err := checkText("label "+k, labels[k], MaxLabelText); err != nil {
			return err
		}
	}
	if n := labelBytes(labels); n > MaxLabelSum {
		return refuse(InvalidArgument, "%d labels have %d bytes: at most %d are allowed", len(labels), n, MaxLabelSum)
	}
	return nil
}

func labelBytes(labels map[string]string) (n int) {
	for k, v := range labels {
		n += len(k) + len(v)
	}
	return n
}

func checkKey(what string, key []byte) error {
	if len(key) != 32 {
		return refuse(InvalidArgument, "%s has %d bytes: want 32", what, len(key))
	}
	if !slices.ContainsFunc(key, func(b byte) bool { return b != 0 }) {
		return refuse(InvalidArgument, "%s is all zero", what)
	}
	return nil
}

func checkSchemas(low, high uint32) error {
	if low > high {
		return refuse(InvalidArgument, "event schemas %d to %d: the first is higher than the last", low, high)
	}
	return nil
}

func checkNewNode(n *skeinv1.NewNode) error {
	if n == nil {
		return refuse(InvalidArgument, "the command names no node")
	}
	if err := checkName(n.GetName()); err != nil {
		return err
	}
	if err := checkKey("the identity key of "+n.GetName(), n.GetIdentityKey()); err != nil {
		return err
	}
	if err := checkKey("the WireGuard key of "+n.GetName(), n.GetWireguardKey()); err != nil {
		return err
	}
	if err := checkSchemas(schemaRange(n.GetMinSchema(), n.GetMaxSchema())); err != nil {
		return err
	}
	if err := CheckSite("the site of "+n.GetName(), n.GetSite()); err != nil {
		return err
	}
	return checkLabels(n.GetLabels())
}

// schemaRange reads what a node says it folds; one that says nothing folds the first schema.
func schemaRange(low, high uint32) (uint32, uint32) {
	return max(low, 1), max(high, 1)
}
