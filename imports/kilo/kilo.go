// Package kilo reads what Kilo keeps in a Kubernetes cluster, as kubectl prints it: annotations of Nodes, and Peers. It
// says what of it is understood as it is, what is not, and in which order to move. Nothing is changed by it.
//
// Invariants: secret keys of Peers are never kept nor shown. The same bytes give the same result. Everything here is
// pure and may be called concurrently.
//
// Source: seeds/kilo-node-annotations.txt.
package kilo

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/kube"
)

// MaxBytes bounds a file.
const MaxBytes = 16 << 20

const (
	prefix   = "kilo.squat.ai/"
	version  = prefix + "v1alpha1"
	maxDepth = 64 // of brackets in a line: the parser calls itself for each
)

// understood are annotations that act here as they do in Kilo.
var understood = []string{"force-endpoint", "force-internal-ip", "leader", "location", "persistent-keepalive"}

// written are annotations that Kilo's agents write themselves, for each other. They mean nothing without Kilo.
var written = []string{
	"discovered-endpoints", "endpoint", "granularity", "internal-ip", "key", "last-seen", "wireguard-ip",
}

// without are annotations that have no counterpart, and why.
var without = map[string]string{
	"allowed-location-ips": "networks behind a location are not led by Nodes' annotations: list them in nodeAddresses " +
		"of one host's configuration, and set route_node_addresses",
	"force-endpoint-port": "write the port in force-endpoint",
}

// Node is what a Node asks for.
type Node struct {
	Name      string      `json:"name"`
	Wishes    part.Wishes `json:"-"`
	Site      string      `json:"site"`
	Leader    bool        `json:"leader"`
	Endpoint  string      `json:"endpoint"`
	Internal  string      `json:"internalIP"`
	Keepalive uint32      `json:"persistentKeepalive"`
	Problems  []string    `json:"problems"` // of values that cannot be used, and of what has no counterpart
	Left      []string    `json:"left"`     // annotations that Kilo's agents have written
}

// Peer is a WireGuard peer that is not a Node. Its preshared key is not read.
type Peer struct {
	Name       string   `json:"name"`
	PublicKey  string   `json:"publicKey"`
	AllowedIPs []string `json:"allowedIPs"`
	Endpoint   string   `json:"endpoint"`
}

// Report is what a file holds.
type Report struct {
	Nodes []Node   `json:"nodes"`
	Peers []Peer   `json:"peers"`
	Notes []string `json:"notes"`
	Steps []string `json:"steps"`
}

// object is a Kubernetes object, as far as it is read.
type object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct {
		Name        string
		Labels      map[string]string
		Annotations map[string]string
	}
	Spec struct {
		PublicKey  string   `yaml:"publicKey"`
		AllowedIPs []string `yaml:"allowedIPs"`
		Endpoint   struct {
			Port    any
			DNSOrIP struct{ DNS, IP string } `yaml:"dnsOrIP"`
		}
	}
	Items []object
}

// Parse reads a file: a List, several documents, or single objects, as YAML or JSON.
func Parse(data []byte) (*Report, error) {
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("the file has more than %d MiB: import it in parts", MaxBytes>>20)
	}
	if deep(data) {
		return nil, fmt.Errorf("brackets are nested more than %d deep", maxDepth)
	}
	r := &Report{Nodes: []Node{}, Peers: []Peer{}, Notes: []string{}}
	others := map[string]int{}
	d := yaml.NewDecoder(bytes.NewReader(data))
	for n := 1; ; n++ {
		var o object
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %s", n, strings.SplitN(err.Error(), "\n", 2)[0])
		}
		all := []object{o}
		if strings.HasSuffix(o.Kind, "List") {
			all = o.Items
		}
		for i, o := range all {
			if err := r.add(o, others); err != nil {
				return nil, fmt.Errorf("document %d, object %d: %w", n, i+1, err)
			}
		}
	}
	if len(r.Nodes) == 0 && len(r.Peers) == 0 {
		return nil, errors.New("there is no Node and no Peer of Kilo in it: write it with `kubectl get " +
			"nodes,peers.kilo.squat.ai -o yaml`")
	}
	r.finish(others)
	return r, nil
}

func (r *Report) add(o object, others map[string]int) error {
	if o.Kind == "" || o.APIVersion == "" {
		return errors.New("apiVersion or kind is missing: it is not a Kubernetes object")
	}
	if o.Metadata.Name == "" {
		return fmt.Errorf("%s without a name", o.Kind)
	}
	switch {
	case o.APIVersion == "v1" && o.Kind == "Node":
		r.Nodes = append(r.Nodes, nodeOf(o))
	case strings.HasPrefix(o.APIVersion, prefix) && o.Kind == "Peer":
		if o.APIVersion != version {
			return fmt.Errorf("Peer %s: %s is not understood; only %s is", o.Metadata.Name, o.APIVersion, version)
		}
		e := o.Spec.Endpoint
		p := Peer{Name: o.Metadata.Name, PublicKey: o.Spec.PublicKey, AllowedIPs: o.Spec.AllowedIPs}
		if host := cmp.Or(e.DNSOrIP.DNS, e.DNSOrIP.IP); host != "" {
			p.Endpoint = fmt.Sprintf("%s:%v", host, e.Port)
		}
		r.Peers = append(r.Peers, p)
	default:
		others[o.Kind]++
	}
	return nil
}

// nodeOf reads a Node's annotations as an agent would.
func nodeOf(o object) Node {
	m := o.Metadata
	w, bad := kube.Check(m.Annotations, m.Labels)
	n := Node{Name: m.Name, Wishes: w, Site: w.Site, Leader: w.Leader, Endpoint: w.ForceEndpoint,
		Keepalive: w.PersistentKeepalive, Problems: []string{}, Left: []string{}}
	if w.InternalIP.IsValid() {
		n.Internal = w.InternalIP.String()
	}
	for _, b := range bad {
		n.Problems = append(n.Problems, b.Name+" is ignored: "+b.Problem)
	}
	for _, name := range slices.Sorted(maps.Keys(m.Annotations)) {
		short, kilos := strings.CutPrefix(name, prefix)
		switch {
		case !kilos || slices.Contains(understood, short):
		case slices.Contains(written, short):
			n.Left = append(n.Left, name)
		case without[short] != "":
			n.Problems = append(n.Problems, name+" has no counterpart: "+without[short])
		default:
			n.Problems = append(n.Problems, name+" is not known here and is ignored")
		}
	}
	return n
}

// finish sorts, and says what concerns all of them.
func (r *Report) finish(others map[string]int) {
	slices.SortFunc(r.Nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(r.Peers, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	sites, left := map[string]bool{}, 0
	for _, n := range r.Nodes {
		sites[n.Site] = true
		left += len(n.Left)
	}
	if len(sites) > 1 {
		r.Notes = append(r.Notes, fmt.Sprintf("The Nodes are in %d locations. Kilo joins locations by their leaders; here "+
			"every "+
			"node has a tunnel to every other, until `skein settings --topology site` has leaders join them (docs/sites.md).",
			len(sites)))
	}
	if left > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d annotations are what Kilo's agents told each other; they can be removed "+
			"when Kilo is gone.", left))
	}
	if len(r.Peers) > 0 {
		r.Notes = append(r.Notes, "Peers are plain WireGuard devices: they are listed, and not taken over. `skein peer "+
			"add` gives "+
			"each a new configuration (docs/peers.md); keep Kilo's device for them until they have it.")
	}
	for _, kind := range slices.Sorted(maps.Keys(others)) {
		r.Notes = append(r.Notes, fmt.Sprintf("%d objects of kind %s were left out.", others[kind], kind))
	}
	r.Steps = []string{
		"Give the agents another port and link than Kilo's while both run: ports.wireguard and dataplane.link, for " +
			"instance 51821 and skein0 beside kilo0. A force-endpoint with Kilo's port then needs skein.dev/force-endpoint " +
			"with the new one.",
		"Run an agent on every Node, with the apiserver's address in its configuration: it goes by the annotations as they " +
			"are.",
		"Lead the pods: `skein settings --pod-ranges` with the controller manager's --cluster-cidr. `skein nodes` shows " +
			"each Node's pod CIDR, and `skein peers` each way. From then on pods' packets between hosts go through the mesh, " +
			"and back: both ends have to be members.",
		"Stop Kilo on one Node after the other (its agent, then its link and rules), once `ip -s link show kilo0` counts " +
			"no more packets of pods.",
		"Remove Kilo's DaemonSet and definitions, and `kubectl annotate nodes --all` those of its annotations that its " +
			"agents wrote.",
	}
}

// deep reports whether brackets are nested deeper than any object's.
func deep(data []byte) bool {
	open := 0
	for _, c := range data {
		switch c {
		case '[', '{':
			if open++; open > maxDepth {
				return true
			}
		case ']', '}':
			open = max(0, open-1)
		}
	}
	return false
}
