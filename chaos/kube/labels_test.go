package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// label waits until a member has a label in the log at every host, or has not.
func (w world) label(host, key, want string, d time.Duration) time.Duration {
	w.Helper()
	return w.within(d, fmt.Sprintf("label %s=%s of %s", key, want, host), func() error {
		for by := range w.nodeOf {
			out := w.skein(by, "nodes", "-o", "json")
			var all struct {
				Nodes []struct {
					Node struct {
						Name   string
						Labels map[string]string
					}
				}
			}
			if err := json.Unmarshal([]byte(out), &all); err != nil {
				return fmt.Errorf("%w: %.300s", err, out)
			}
			seen := false
			for _, n := range all.Nodes {
				if n.Node.Name == host {
					seen = true
					if have := n.Node.Labels[key]; have != want {
						return fmt.Errorf("%s has %v", by, n.Node.Labels)
					}
				}
			}
			if !seen {
				return fmt.Errorf("%s does not show %s: %.300s", by, host, out)
			}
		}
		return nil
	})
}

// labelsChooseGateways: a label of a Node makes its host a gateway, and ends that with itself.
func (w world) labelsChooseGateways() {
	w.kubectl([]byte(`{"apiVersion":"skein.dev/v1alpha1","kind":"Egress","metadata":{"namespace":"default","name":"edge"},
		"spec":{"destinations":["203.0.113.0/24"],"gateways":{"skein.dev/edge":"yes"}}}`), "apply", "-f", "-")
	w.reason("Applied", "", "egress.skein.dev", "edge")
	owners := func() string { return w.get("{.status.owners}", "egress.skein.dev", "edge") }
	if o := owners(); o != "" {
		w.Errorf("without the label it has %q", o)
	}
	var took []time.Duration
	for range 3 {
		w.kubectl(nil, "label", "node", "cloud1", "skein.dev/edge=yes", "plain=yes")
		began := time.Now()
		w.label("cloud1", "skein.dev/edge", "yes", 10*time.Second)
		took = append(took, time.Since(began))
		w.within(20*time.Second, "its slot's owner", func() error {
			if o := owners(); o != "cloud1" {
				return errors.New(o)
			}
			return nil
		})
		w.label("cloud1", "plain", "", 0)
		w.kubectl(nil, "label", "node", "cloud1", "skein.dev/edge-", "plain-")
		took = append(took, w.label("cloud1", "skein.dev/edge", "", 10*time.Second))
		w.within(20*time.Second, "the slot has no owner", func() error {
			if o := owners(); o != "" {
				return errors.New(o)
			}
			return nil
		})
	}
	slices.Sort(took)
	w.Logf("a label is in the log at every host %s to %s after kubectl has returned",
		took[0].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
	w.label("dc1", "gateway", "yes", 0) // of the host's configuration
	w.kubectl(nil, "delete", "egress.skein.dev", "edge", "--timeout=20s")

	long := "skein.dev/" + strings.Repeat("x", 60)
	w.kubectl(nil, "label", "node", "cloud1", long+"=1", "skein.dev/short=1")
	w.label("cloud1", "skein.dev/short", "1", 10*time.Second)
	w.within(10*time.Second, "a label that the log cannot have is told", func() error {
		if p := strings.Join(w.problems("dc1"), "; "); !strings.Contains(p, long) {
			return errors.New(p)
		}
		return nil
	})
	w.kubectl(nil, "label", "node", "cloud1", long+"-", "skein.dev/short-")
	w.label("cloud1", "skein.dev/short", "", 10*time.Second)
	w.within(10*time.Second, "no problem is left", func() error { return none(w.problems("dc1")) })
}

// kubeletsChooseNothing: who has a kubelet's identity does not make its host a gateway.
func (w world) kubeletsChooseNothing() {
	as := []string{"--as=system:node:cloud1", "--as-group=system:nodes", "--as-group=system:authenticated"}
	for _, c := range []struct {
		what    string
		args    []string
		refused string
	}{
		{"a label", []string{"label", "node", "cloud1", "skein.dev/edge=yes"}, "no label under skein.dev/"},
		{"an annotation", []string{"annotate", "node", "cloud1", "skein.dev/location=x"}, "no annotation under skein.dev/"},
		{"a record", []string{"annotate", "--overwrite", "node", "cloud1", "skein.dev/record=x"}, "no annotation under " +
			"skein.dev/"},
		{"its own label", []string{"label", "node", "cloud1", "example.com/x=y"}, ""},
		{"that label again", []string{"label", "node", "cloud1", "example.com/x-"}, ""},
		{"the taint", []string{"taint", "node", "cloud1", taint + ":NoSchedule"}, "taint"},
	} {
		out, err := w.cluster.Kubectl(w.Context(), nil, append(c.args, as...)...)
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			w.Errorf("%s: %s, %v; want it refused: %q", c.what, out, err, c.refused)
		}
	}
	made := []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"new1","labels":{"skein.dev/edge":"yes"}}}`)
	out, err := w.cluster.Kubectl(w.Context(), made, "create", "-f", "-", "--as=system:node:new1",
		"--as-group=system:nodes", "--as-group=system:authenticated")
	if err == nil || !strings.Contains(err.Error(), "no label under skein.dev/") {
		w.Errorf("a kubelet registers its Node with a label: %s, %v", out, err)
	}
}
