package events

import (
	"maps"
	"slices"
	"strings"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// KubernetesPrefix begins the keys of labels that members have from their Nodes in Kubernetes. The apiserver has the
// say about them.
const KubernetesPrefix = "skein.dev/"

// maxLabelValue is Kubernetes' bound of a label's value. Hosts may join with longer ones (MaxLabelText).
const maxLabelValue = 63

const alphanumeric = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

// CheckLabel refuses a label that Kubernetes would refuse, or whose key the log cannot have. What a host joins with may
// be in a wider form; who sets a label later is held to this one, so that it means the same as a Node's.
func CheckLabel(key, value string) error {
	prefix, name, slash := strings.Cut(key, "/")
	if !slash {
		prefix, name = "", key
	}
	switch {
	case len(key) > MaxLabelKey:
		return refuse(InvalidArgument, "label %.80q: the key has %d characters: at most %d are allowed", key,
			len(key), MaxLabelKey)
	case slash && !isSubdomain(prefix):
		return refuse(InvalidArgument, "label %.80q: the key's prefix %.80q is not a DNS name: "+
			"use lower-case letters, digits, hyphens and dots, such as example.com/rack", key, prefix)
	case !isLabelText(name):
		return refuse(InvalidArgument, "label %.80q: want a key of letters, digits, hyphens, underscores and dots, "+
			"with a letter or digit at both ends, such as rack or example.com/rack", key)
	case len(value) > maxLabelValue:
		return refuse(InvalidArgument, "label %s: the value has %d characters: at most %d are allowed", key,
			len(value), maxLabelValue)
	case value != "" && !isLabelText(value):
		return refuse(InvalidArgument, "label %s: the value %.80q may be empty, or have letters, digits, hyphens, "+
			"underscores and dots, with a letter or digit at both ends", key, value)
	}
	return nil
}

// isLabelText is the syntax that the name in a label's key and its value have in common.
func isLabelText(s string) bool {
	return s != "" && strings.Trim(s, alphanumeric+"-_.") == "" &&
		strings.Trim(s[:1], alphanumeric) == "" && strings.Trim(s[len(s)-1:], alphanumeric) == ""
}

func isSubdomain(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || strings.Trim(part, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || part[0] == '-' ||
			part[len(part)-1] == '-' {
			return false
		}
	}
	return true
}

// checkLabelsAre refuses a change that was made from other labels than the node has by now: two who change different
// labels at once would else undo each other's.
func checkLabelsAre(n *skeinv1.Node, c *skeinv1.ChangeNode) error {
	if !c.GetCheckLabels() || maps.Equal(n.GetLabels(), c.GetLabelsWere()) {
		return nil
	}
	return refuse(Aborted, "the labels of node %s have been changed meanwhile; it has %s: ask again", n.GetName(),
		labelList(n.GetLabels()))
}

// labelList names labels, for people.
func labelList(labels map[string]string) string {
	if len(labels) == 0 {
		return "none"
	}
	var out []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, " ")
}

// Relabel is what a member's labels are after some are set and others, named by their keys, are removed. It refuses
// what Kubernetes would refuse, and the removal of what is not there. Labels under KubernetesPrefix are not set here;
// node is the Node in Kubernetes that the member says it is, and as long as it says so they are not removed either.
func Relabel(n *skeinv1.Node, node string, set map[string]string, remove []string) (map[string]string, error) {
	next := maps.Clone(n.GetLabels())
	if next == nil {
		next = map[string]string{}
	}
	for _, key := range slices.Sorted(maps.Keys(set)) {
		if strings.HasPrefix(key, KubernetesPrefix) {
			return nil, ofKubernetes(n, node, key, "="+set[key])
		}
		if err := CheckLabel(key, set[key]); err != nil {
			return nil, err
		}
		next[key] = set[key]
	}
	for _, key := range remove {
		if _, both := set[key]; both {
			return nil, refuse(InvalidArgument, "label %.80q is to be set and removed at once: say one of the two", key)
		}
		if strings.HasPrefix(key, KubernetesPrefix) && node != "" {
			return nil, ofKubernetes(n, node, key, "-")
		}
		if _, have := next[key]; !have {
			return nil, refuse(NotFound, "node %s has no label %.80q; it has %s", n.GetName(), key, labelList(next))
		}
		delete(next, key)
	}
	return next, nil
}

// ofKubernetes refuses a label that is the apiserver's.
func ofKubernetes(n *skeinv1.Node, node, key, change string) error {
	if node == "" {
		return refuse(FailedPrecondition, "label %.80q: labels under %s are those of Nodes in Kubernetes, and member "+
			"%s is not one: choose a key without that prefix", key, KubernetesPrefix, n.GetName())
	}
	return refuse(FailedPrecondition, "label %.80q: labels under %s are those of Node %s in Kubernetes, and only "+
		"the apiserver can change them: run `kubectl label node %s %.80s`", key, KubernetesPrefix, node, node, key+change)
}
