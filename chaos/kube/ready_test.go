package kube

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const taint = "skein.dev/agent-not-ready"

// tainted waits until the Node of a host has our taint, or has not.
func (w world) tainted(host string, want bool, d time.Duration) time.Duration {
	w.Helper()
	return w.within(d, fmt.Sprintf("taint of %s: %v", w.nodeOf[host], want), func() error {
		out, err := w.cluster.Kubectl(w.Context(), nil, "get", "node", w.nodeOf[host], "-o",
			`jsonpath={range .spec.taints[*]}{.key}:{.effect} {end}`)
		if err != nil || strings.Contains(out, taint+":NoSchedule") != want {
			return fmt.Errorf("%q, %v", out, err)
		}
		return nil
	})
}

// configured waits until home1's container runtime has its configuration, or has not.
func (w world) configured(want bool, d time.Duration) {
	w.Helper()
	w.within(d, fmt.Sprintf("network configuration: %v", want), func() error {
		b, err := os.ReadFile(filepath.Join(w.dir, "net.d", "10-skein.conflist"))
		if (err == nil && strings.Contains(string(b), `"skein-cni"`)) != want {
			return fmt.Errorf("%s, %v", b, err)
		}
		return nil
	})
}

// readiness: the configuration is written last, and the taint is off only then, also after the host has started anew.
func (w world) readiness() {
	w.configured(true, 20*time.Second)
	if _, err := os.Stat(filepath.Join(w.dir, "bin", "skein-cni")); err != nil {
		w.Error(err)
	}
	for host := range w.nodeOf {
		w.tainted(host, false, 20*time.Second)
	}
	// A taint of somebody else's, and ours by hand: the agent takes away its own.
	w.kubectl(nil, "taint", "node", w.nodeOf["home1"], "other=x:NoSchedule", taint+":NoSchedule")
	took := w.tainted("home1", false, 20*time.Second)
	w.Logf("a Node whose agent is ready is free of the taint %s after it was put on", took.Round(time.Millisecond))
	if out := w.get("{.spec.taints[*].key}", "node", w.nodeOf["home1"]); !strings.Contains(out, "other") {
		w.Errorf("the taints that are left: %q", out)
	}
	w.kubectl(nil, "taint", "node", w.nodeOf["home1"], "other-")

	w.skein("dc1", "pool", "drain", "default") // so that STATUS is 50
	info, err := w.lab.Node("home1")
	if err != nil {
		w.Fatal(err)
	}
	w.within(20*time.Second, "home1 gives its blocks back", func() error {
		if out := w.skein("home1", "pool", "show", "default"); strings.Contains(out, "home1") {
			return errors.New(out)
		}
		return nil
	})
	restart := func() {
		w.Helper()
		if err := w.lab.Stop(w.Context(), "home1"); err != nil {
			w.Fatal(err)
		}
		w.configured(true, 0)                                                       // pods go on
		if err := os.Remove(filepath.Join(info.Dir, "run", "served")); err != nil { // as a restart of the host does
			w.Fatal(err)
		}
		if err := w.lab.Start(w.Context(), "home1"); err != nil {
			w.Fatal(err)
		}
	}
	restart()
	w.configured(false, 20*time.Second)
	w.tainted("home1", true, 30*time.Second)
	w.skein("dc1", "pool", "drain", "default", "--undo")
	w.configured(true, 30*time.Second)
	w.tainted("home1", false, 30*time.Second)
}

// lostAgent: the Node of an agent that is lost is tainted, and free again once it is back.
func (w world) lostAgent() {
	if err := w.lab.Kill(w.Context(), "cloud1"); err != nil {
		w.Fatal(err)
	}
	took := w.tainted("cloud1", true, 90*time.Second)
	w.Logf("the Node of a killed agent is tainted after %s", took.Round(time.Millisecond))
	began := time.Now()
	if err := w.lab.Start(w.Context(), "cloud1"); err != nil {
		w.Fatal(err)
	}
	w.tainted("cloud1", false, 60*time.Second)
	w.Logf("it is free again %s after the start", time.Since(began).Round(time.Millisecond))
}

// taintsAreGuarded: an agent changes that one taint of its own Node, an admin node that one of any.
func (w world) taintsAreGuarded() {
	w.kubectl([]byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"other1"}}`), "create", "-f", "-")
	defer w.kubectl(nil, "delete", "node", "other1")
	w.kubectl(nil, "taint", "node", "cloud1", "guard=x:NoSchedule")
	defer w.kubectl(nil, "taint", "node", "cloud1", "guard-")
	for _, c := range []struct {
		what, account, node, target, taint, refused string
	}{
		{"ours on its own Node", "skein-agent", "cloud1", "cloud1", taint + ":NoSchedule", ""},
		{"another taint", "skein-agent", "cloud1", "cloud1", "x:NoSchedule", "no taint but " + taint},
		{"another's taint off", "skein-agent", "cloud1", "cloud1", "guard-", "no taint but " + taint},
		{"ours with another effect", "skein-agent", "cloud1", "cloud1", taint + ":NoExecute", "no taint but " + taint},
		{"ours with a value", "skein-agent", "cloud1", "cloud1", taint + "=x:NoSchedule", "no taint but " + taint},
		{"ours on another's Node", "skein-agent", "cloud1", "gone1", taint + ":NoSchedule", "its own Node, cloud1, alone"},
		{"by an admin", "skein-admin", "dc1", "other1", taint + ":NoSchedule", ""},
		{"and off again", "skein-admin", "dc1", "other1", taint + "-", ""},
		{"another taint by an admin", "skein-admin", "dc1", "other1", "x:NoSchedule", "no taint but " + taint},
	} {
		token, err := w.cluster.Token(w.Context(), c.account, c.node)
		if err != nil {
			w.Fatal(err)
		}
		out, err := w.cluster.As(w.Context(), token, nil, "taint", "node", c.target, c.taint)
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			w.Errorf("%s: %s, %v; want it refused: %q", c.what, out, err, c.refused)
		}
	}
	token, err := w.cluster.Token(w.Context(), "skein-admin", "dc1")
	if err != nil {
		w.Fatal(err)
	}
	for what, body := range map[string]string{
		"a record":     `{"metadata":{"annotations":{"skein.dev/record":"x"}}}`,
		"a label":      `{"metadata":{"labels":{"skein.dev/gateway":"yes"}}}`,
		"cordoning":    `{"spec":{"unschedulable":true}}`,
		"a pod's CIDR": `{"spec":{"podCIDR":"10.1.0.0/24","podCIDRs":["10.1.0.0/24"]}}`,
	} {
		if out, err := w.cluster.As(w.Context(), token, nil, "patch", "node", "other1", "--type=merge", "-p",
			body); err == nil {
			w.Errorf("an admin node writes %s of another's Node: %s", what, out)
		}
	}
	condition := `{"status":{"conditions":[{"type":"NetworkUnavailable","status":"True"}]}}`
	if out, err := w.cluster.As(w.Context(), token, nil, "patch", "node", "other1", "--subresource=status", "--type=merge",
		"-p", condition); err == nil {
		w.Errorf("an admin node writes the status of another's Node: %s", out)
	}
}
