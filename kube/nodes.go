package kube

import (
	"crypto/sha256"
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	annotationtier "github.com/skeinmesh/skein/gossip/kube"
)

// Node is what skein uses of a Kubernetes Node.
type Node struct {
	Name        string            `json:"name"`
	UID         string            `json:"uid"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"` // without the record

	record    string // the record's annotation; empty once it has been dealt with
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

// takeRecords hands each record that has come since the last call to take, which says whether it is dealt with; what
// is not comes again. Its text is let go then: a thousand of them would be in memory for nothing.
func (s nodes) takeRecords(take func(n *Node, value string) (done bool)) {
	s.mu.Lock()
	var waiting []*Node
	for _, n := range s.all {
		if n.record != "" {
			waiting = append(waiting, n)
		}
	}
	s.mu.Unlock()
	for _, n := range waiting {
		if take(n, n.record) {
			s.mu.Lock()
			n.record = ""
			s.mu.Unlock()
		}
	}
}
