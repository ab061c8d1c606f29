package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
)

// webNames are the pods of webs.
var webNames = []string{"web-cp1", "web-home1", "web-cloud1"}

// services: kube-proxy in nft mode translates to pods on other nodes, for hosts and pods, for both families, and at the
// nodes' own ports. A virtual machine, which has no kube-proxy, reaches the backends themselves.
func (f fleet) services() {
	f.serviceRoutes()
	f.apply(service("web", object{"app": "web"}, 80), f.datagrams(),
		with(service("port", object{"app": "web"}, 80), "spec.type", "NodePort"))
	nodePort, err := strconv.Atoi(f.kubectl(nil, "get", "service", "port", "-o", "jsonpath={.spec.ports[0].nodePort}"))
	if err != nil {
		f.Fatal(err)
	}
	from := map[string]string{}
	for node := range f.Workers {
		from["host "+node] = f.host(node)
		from["pod web-"+node] = f.inside(node, "web-"+node)
	}
	for who, ns := range from {
		for _, at := range f.clusterIPs("web") {
			f.answersOf(fmt.Sprintf("from %s to the Service at %s", who, at), webNames,
				func(ctx context.Context) (string, error) { return get(ctx, ns, at, 80, "/hostname") })
		}
	}
	udp := f.clusterIPs("datagrams")
	for _, at := range udp {
		f.answersOf(fmt.Sprintf("datagrams from pod web-home1 to %s", at), webNames,
			func(ctx context.Context) (string, error) { return echo(ctx, from["pod web-home1"], at, 53) })
	}
	for node := range f.Workers {
		for _, at := range f.Workers[node].Addresses {
			f.answersOf(fmt.Sprintf("from vm1 to port %d of node %s at %s", nodePort, node, at), webNames,
				func(ctx context.Context) (string, error) { return get(ctx, f.host("vm1"), at, nodePort, "/hostname") })
		}
	}
	f.backendsFromVM()
}

// serviceRoutes gives each host a route for the Services' IPv6 addresses, as docs/kubernetes.md says: the lab's hosts
// have no other than the overlay's, and the kernel looks for one before kube-proxy translates.
func (f fleet) serviceRoutes() {
	_, services, _ := strings.Cut(serviceRange, ",")
	for node := range f.Workers {
		out, exit, err := f.Lab.Exec(f.Context(), node, "ip", "-6", "route", "replace", services, "dev",
			dataplane.DefaultNumbers().Link)
		if err != nil || exit != 0 {
			f.Fatalf("route on %s: %d, %v: %s", node, exit, err, out)
		}
	}
}

// datagrams is a Service that has the pods of webs as its backends.
func (f fleet) datagrams() object {
	s := service("datagrams", object{"app": "web"}, 53)
	return with(s, "spec.ports", []object{{"port": 53, "targetPort": 8080, "protocol": "UDP"}})
}

// backendsFromVM: a host outside of the cluster asks what the Service's EndpointSlices name.
func (f fleet) backendsFromVM() {
	out := strings.Fields(f.kubectl(nil, "get", "endpointslices", "-l", "kubernetes.io/service-name=web", "-o",
		"jsonpath={.items[*].endpoints[*].addresses[*]}"))
	if len(out) != 2*len(webNames) {
		f.Errorf("the Service's backends are %v, want two for each of %v", out, webNames)
	}
	for _, text := range out {
		at := netip.MustParseAddr(text)
		f.await(10*time.Second, "vm1 reaches backend "+text, func() error {
			name, err := get(f.Context(), f.host("vm1"), at, 8080, "/hostname")
			if err == nil && !slices.Contains(webNames, name) {
				err = fmt.Errorf("%q answers", name)
			}
			return err
		})
	}
}

// volatile is what changes in a table by itself.
var volatile = regexp.MustCompile(`counter packets \d+ bytes \d+|expires \S+|# handle \d+`)

// table is a table of a host's nftables: its handle, which changes when somebody removes it and makes it again, and its
// lines in order, since a map's elements have none.
func (f fleet) table(node, family, name string) (handle string, lines []string) {
	f.Helper()
	out, exit, err := f.Lab.Exec(f.Context(), node, "nft", "-a", "list", "table", family, name)
	if err != nil || exit != 0 {
		f.Fatalf("table %s %s on %s: %d, %v: %s", family, name, node, exit, err, out)
	}
	handle, rest, _ := strings.Cut(out, "\n")
	for l := range strings.SplitSeq(rest, "\n") {
		lines = append(lines, strings.TrimSpace(volatile.ReplaceAllString(l, "")))
	}
	slices.Sort(lines)
	return handle, lines
}

// differences are the lines of one table that the other lacks.
func differences(before, after []string) (out []string) {
	for _, l := range before {
		if !slices.Contains(after, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range after {
		if !slices.Contains(before, l) {
			out = append(out, "+ "+l)
		}
	}
	return out
}

// unmoved does something until no block has come to a node or gone meanwhile, five times at most: what differs
// afterwards is its doing. Nodes give empty blocks back, and spare ones, at times of their own.
func (f fleet) unmoved(do func(moved func() bool)) {
	f.Helper()
	c, err := f.Lab.Client("hub")
	if err != nil {
		f.Fatal(err)
	}
	blocks := func() (out []string) {
		r, err := c.Blocks(f.Context(), &skeinv1.BlocksRequest{})
		if err != nil {
			f.Fatal(err)
		}
		for _, b := range r.GetBlocks() {
			out = append(out, b.GetBlock().GetNodeId()+" "+b.GetBlock().GetIpv4())
		}
		slices.Sort(out)
		return out
	}
	for range 5 {
		before := blocks()
		moved := func() bool { return !slices.Equal(blocks(), before) }
		if do(moved); !moved() {
			return
		}
	}
	f.Fatal("nodes take and give back blocks without end")
}

// tablesSideBySide: kube-proxy and skein each keep to their own tables, also when they start again.
func (f fleet) tablesSideBySide() {
	const node = controlPlane // an egress gateway, behind a NAT
	table := dataplane.DefaultNumbers().NftTable
	w := f.Workers[node]
	var handle, h string
	var skein, after []string
	n := 0
	f.unmoved(func(func() bool) {
		n++
		name := fmt.Sprint("later", n)
		f.remove("service/" + name)
		handle, skein = f.table(node, "inet", table)
		if err := errors.Join(w.StopProxy(), w.StartProxy()); err != nil {
			f.Fatal(err)
		}
		f.apply(service(name, object{"app": "web"}, 80)) // kube-proxy is at work again when it has this
		f.await(20*time.Second, "kube-proxy has the new Service", func() error {
			if _, proxy := f.table(node, "ip6", "kube-proxy"); !strings.Contains(strings.Join(proxy, "\n"), "default/"+name) {
				return fmt.Errorf("it is not in its tables")
			}
			return nil
		})
		h, after = f.table(node, "inet", table)
	})
	if h != handle || len(differences(skein, after)) > 0 {
		f.Errorf("kube-proxy's start has changed skein's table, %s then %s: %q", handle, h, differences(skein, after))
	}
	proxy, lines := map[string]string{}, map[string][]string{}
	f.unmoved(func(moved func() bool) {
		for _, family := range []string{"ip", "ip6"} {
			proxy[family], lines[family] = f.table(node, family, "kube-proxy")
		}
		_, skein = f.table(node, "inet", table)
		if err := errors.Join(f.Lab.Stop(f.Context(), node), f.Lab.Start(f.Context(), node)); err != nil {
			f.Fatal(err)
		}
		if err := f.Lab.WaitConverged(f.Context(), 30*time.Second); err != nil {
			f.Fatal(err)
		}
		f.await(15*time.Second, "skein's table is as it was", func() error {
			if _, after = f.table(node, "inet", table); len(differences(skein, after)) > 0 && !moved() {
				return fmt.Errorf("%q", differences(skein, after))
			}
			return nil
		})
	})
	for family, handle := range proxy {
		h, after := f.table(node, family, "kube-proxy")
		if h != handle || len(differences(lines[family], after)) > 0 {
			f.Errorf("the agent's start has changed kube-proxy's table, %s then %s: %q", handle, h,
				differences(lines[family], after))
		}
	}
	for _, at := range f.clusterIPs("web") {
		f.answersOf("the Service at "+at.String()+" afterwards", webNames, func(ctx context.Context) (string, error) {
			return get(ctx, f.host("home1"), at, 80, "/hostname")
		})
	}
}

// names: CoreDNS answers pods on each node, with addresses of both families.
func (f fleet) names() {
	headless := service("webs", object{"app": "web"}, 8080)
	f.apply(service("web", object{"app": "web"}, 80), with(headless, "spec.clusterIP", "None"))
	f.remove("service/webs")
	var pods []netip.Addr
	for _, name := range webNames {
		pods = append(pods, f.addresses(name)...)
	}
	for node := range f.Workers {
		name := "web-" + node
		ns := f.inside(node, name)
		r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer(ns)(ctx, network, net.JoinHostPort(dnsService, "53"))
		}}
		for ask, want := range map[string][]netip.Addr{
			"web.default.svc.cluster.local.":  f.clusterIPs("web"),
			"webs.default.svc.cluster.local.": pods,
		} {
			f.await(15*time.Second, name+" asks for "+ask, func() error {
				var have []netip.Addr
				for _, family := range []string{"ip4", "ip6"} {
					some, err := r.LookupNetIP(f.Context(), family, ask)
					if err != nil {
						return err
					}
					have = append(have, some...)
				}
				sorted := func(a []netip.Addr) []netip.Addr { return slices.SortedFunc(slices.Values(a), netip.Addr.Compare) }
				if !slices.Equal(sorted(have), sorted(want)) {
					return fmt.Errorf("the answers are %v, want %v", have, want)
				}
				return nil
			})
		}
		// With the pod's own resolv.conf and its search domains: the pod itself asks the Service by its short name.
		f.await(15*time.Second, name+" reaches the Service by its short name", func() error {
			out, err := getWithin(f.Context(), 10*time.Second, f.host(node), f.addresses(name)[0], 8080,
				"/dial?host=web&port=80&protocol=http&request=hostname&tries=1")
			if err == nil && !strings.Contains(out, `"responses":["web-`) {
				err = fmt.Errorf("%s", out)
			}
			return err
		})
	}
}

// dualStack: pods on different nodes reach each other in both families, each as itself.
func (f fleet) dualStack() {
	for a := range f.Workers {
		ns, own := f.inside(a, "web-"+a), f.addresses("web-"+a)
		for b := range f.Workers {
			if a == b {
				continue
			}
			for i, at := range f.addresses("web-" + b) {
				f.seenAs(fmt.Sprintf("web-%s to web-%s at %s", a, b, at), ns, at, 8080, "/clientip", own[i])
			}
		}
	}
}

// hostPorts: the chained portmap plugin opens a port of the node for a pod, in both families, and closes it with it.
func (f fleet) hostPorts() {
	ports := []object{{"containerPort": 8080, "hostPort": 9080, "protocol": "TCP"}}
	f.apply(with(web("ported", "home1"), "spec.containers.ports", ports))
	f.remove("pod/ported")
	f.ready("ported")
	for _, at := range f.Workers["home1"].Addresses {
		for _, from := range []string{"cloud1", "vm1"} {
			f.await(10*time.Second, fmt.Sprintf("from %s to the host port at %s", from, at), func() error {
				name, err := get(f.Context(), f.host(from), at, 9080, "/hostname")
				if err == nil && name != "ported" {
					err = fmt.Errorf("%q answers", name)
				}
				return err
			})
		}
	}
	f.kubectl(nil, "delete", "pod", "ported")
	f.await(10*time.Second, "the host port is closed", func() error {
		if name, err := get(f.Context(), f.host("vm1"), f.Workers["home1"].Addresses[0], 9080, "/hostname"); err == nil {
			return fmt.Errorf("%s still answers", name)
		}
		return nil
	})
}

// longPage is a page of about 8 MB, which a pod makes and sends.
const longPage = "/shell?cmd=seq+1+1000000"

// bandwidth: the chained bandwidth plugin limits a pod by its annotation. The runtime asks for a burst of 2 MB at this
// rate, so the page must be longer than that.
func (f fleet) bandwidth() {
	limits := object{"kubernetes.io/egress-bandwidth": "100k", "kubernetes.io/ingress-bandwidth": "100k"}
	f.apply(with(web("limited", "home1"), "metadata.annotations", limits))
	f.remove("pod/limited")
	f.ready("limited")
	began := time.Now()
	free, err := readFor(f.Context(), 30*time.Second, f.host("home1"), f.addresses("web-home1")[0])
	took := time.Since(began)
	if err != nil {
		f.Fatalf("the page of a pod without a limit: %d bytes, %v", free, err)
	}
	limited, err := readFor(f.Context(), took+2*time.Second, f.host("home1"), f.addresses("limited")[0])
	f.Logf("without a limit %d bytes in %s, with 100 kbit/s %d in 2 s more", free, took.Round(time.Millisecond), limited)
	if !errors.Is(err, context.DeadlineExceeded) || limited > free/2 {
		f.Errorf("a pod with a limit sent %d of %d bytes: %v", limited, free, err)
	}
}

// readFor reads a pod's page for some time, and returns how much came.
func readFor(ctx context.Context, d time.Duration, ns string, at netip.Addr) (n int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	c := http.Client{Transport: &http.Transport{DialContext: dialer(ns), DisableKeepAlives: true}}
	page := "http://" + net.JoinHostPort(at.String(), "8080") + longPage
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, page, nil)
	if err != nil {
		return 0, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	return io.Copy(io.Discard, resp.Body)
}
