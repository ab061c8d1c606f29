package kube

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// namesOfHosts: a host that is not a Node has a name in the cluster, as long as it is a member. It ends vm1.
func (w world) namesOfHosts() {
	objects := func() string {
		return w.get(`{range .items[*]}{.kind}/{.metadata.name} {end}`, "-n", "skein-system", "services,endpointslices")
	}
	const all = "Service/vm1 EndpointSlice/vm1-v4 EndpointSlice/vm1-v6"
	there := func(want string) {
		w.Helper()
		took := w.within(20*time.Second, "names: "+want, func() error {
			if have := strings.TrimSpace(objects()); have != want {
				return errors.New(have)
			}
			return nil
		})
		w.Logf("names are %q after %s", want, took.Round(time.Millisecond))
	}
	told := func(says string) {
		w.Helper()
		w.within(20*time.Second, "told: "+says, func() error {
			if p := strings.Join(w.problems("dc1"), "; "); (says != "") != strings.Contains(p, "name vm1") ||
				!strings.Contains(p, says) {
				return fmt.Errorf("problems: %q", p)
			}
			return nil
		})
	}
	there(all)
	info, err := w.lab.Node("vm1")
	if err != nil {
		w.Fatal(err)
	}
	for slice, family := range map[string]string{"vm1-v4": "IPv4", "vm1-v6": "IPv6"} {
		have := strings.Fields(w.get(`{.addressType} {.endpoints[*].addresses[*]}`, "-n", "skein-system",
			"endpointslice", slice))
		if len(have) != 2 || have[0] != family || !slices.Contains(info.Overlay, have[1]) {
			w.Errorf("%s: %v, want one of %v", slice, have, info.Overlay)
		}
	}
	if ip := w.get("{.spec.clusterIP}", "-n", "skein-system", "service", "vm1"); ip != "None" {
		w.Errorf("its Service has the address %s", ip)
	}
	w.kubectl(nil, "-n", "skein-system", "delete", "endpointslice", "vm1-v4")
	there(all)

	// A Node of that name: the name stays the member's, and both are told of.
	w.kubectl([]byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"vm1"}}`), "create", "-f", "-")
	told("a Node has the name of this member")
	there(all)
	w.kubectl(nil, "delete", "node", "vm1")
	told("")

	// An object of somebody else's under that name stays as it is.
	w.kubectl(nil, "-n", "skein-system", "label", "service", "vm1", "skein.dev/member-", "app.kubernetes.io/managed-by-")
	told("services skein-system/vm1 exists and was not created by skein")
	w.kubectl(nil, "-n", "skein-system", "delete", "service", "vm1")
	told("")
	there(all)

	w.namesAreGuarded()
	if err := w.lab.Kill(w.Context(), "vm1"); err != nil { // its agent would end, and the lab wonder why
		w.Fatal(err)
	}
	w.skein("dc1", "node", "revoke", "vm1")
	there("")
}

// namesAreGuarded: what an admin node may write leads no other traffic astray.
func (w world) namesAreGuarded() {
	token, err := w.cluster.Token(w.Context(), "skein-admin", "dc1")
	if err != nil {
		w.Fatal(err)
	}
	w.kubectl([]byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"other","namespace":"skein-system"},
		"spec":{"clusterIP":"None"}}`), "create", "-f", "-")
	defer w.kubectl(nil, "-n", "skein-system", "delete", "service", "other")
	service := func(name, ns, spec string) string {
		return fmt.Sprintf(
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":%q,"namespace":%q,"labels":{"skein.dev/member":%q}},"spec":%s}`,
			name, ns, name, spec)
	}
	for what, c := range map[string]struct{ body, refused string }{
		"an external address": {service("x", "skein-system", `{"clusterIP":"None","externalIPs":["192.0.2.1"]}`),
			"headless Services alone"},
		"an address":        {service("x", "skein-system", `{"ports":[{"port":80}]}`), "headless Services alone"},
		"another namespace": {service("x", "default", `{"clusterIP":"None"}`), "forbidden"},
		"another's slice": {`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"x","namespace":"skein-system",
			"labels":{"skein.dev/member":"x","kubernetes.io/service-name":"other"}},"addressType":"IPv4","endpoints":[]}`, "EndpointSlices of members alone"},
	} {
		out, err := w.cluster.As(w.Context(), token, []byte(c.body), "create", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), c.refused) {
			w.Errorf("%s: %s, %v; want it refused: %s", what, out, err, c.refused)
		}
	}
	if out, err := w.cluster.As(w.Context(), token, nil, "-n", "skein-system", "delete", "service", "other"); err == nil {
		w.Errorf("somebody else's Service: %s", out)
	}
}
