package kube

import (
	"crypto/sha256"
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/identity"
)

// Node is what skein uses of a Kubernetes Node.
type Node struct {
	Name        string            `json:"name"`
	UID         string            `json:"uid"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"` // without the record

	record    string      // the record's annotation; empty once it has been dealt with
	recordOf  identity.ID // whose it says it is, once it has been read; who that is decides whether it is read again
	recordSum [sha256.Size]byte
	hasRecord bool
}

func slimNode(o metav1.Object) *Node {
	n := &Node{Name: o.GetName(), UID: string(o.GetUID()), Annotations: kept(o.GetAnnotations(), relevantAnnotation)}
	n.Labels = kept(o.GetLabels(), func(name string) bool { return name == regionLabel || isOurs(name) })
	if n.record, n.hasRecord = o.GetAnnotations()[annotationtier.Annotation]; n.hasRecord {
		n.recordSum = sha256.Sum256([]byte(n.record))
	}
	return n
}

// kept is what is relevant of annotations or labels; nil: nothing.
func kept(all map[string]string, relevant func(name string) bool) map[string]string {
	var out map[string]string
	for name, value := range all {
		if relevant(name) {
			if out == nil {
				out = map[string]string{}
			}
			out[name] = value
		}
	}
	return out
}

func (n *Node) same(o *Node) bool {
	return n.UID == o.UID && n.hasRecord == o.hasRecord && n.recordSum == o.recordSum &&
		maps.Equal(n.Labels, o.Labels) && maps.Equal(n.Annotations, o.Annotations)
}

// nodes are the Nodes of the cluster.
type nodes struct {
	*mirror[*Node]
	holders *holders
}

// get is a Node by its name; nil: there is none.
func (s nodes) get(name string) *Node {
	n, _ := s.mirror.get(name)
	return n
}

// eachNewRecord hands on each record that has come since the last call, to be dealt with. One of a node that is not a
// member waits until it is one, without being read again: take tells whose it is, and isMember whether the wait is
// over. The text of one that is done is let go: a thousand of them would be in memory for nothing.
func (s nodes) eachNewRecord(isMember func(identity.ID) bool,
	take func(n *Node, value string) (of identity.ID, done bool)) {
	s.mu.Lock()
	var due []*Node
	for _, n := range s.all {
		if n.record != "" && (n.recordOf.IsZero() || isMember(n.recordOf)) {
			due = append(due, n)
		}
	}
	s.mu.Unlock()
	for _, n := range due {
		of, done := take(n, n.record)
		s.mu.Lock()
		n.recordOf = of
		if done {
			n.record = ""
		}
		s.mu.Unlock()
	}
}
