package cnitable

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/cni"
)

// always expects one code in every version.
func always(code uint32) func(string) uint32 { return func(string) uint32 { return code } }

// since expects a code from a version on; before it the verb does not exist, and the plugin says so.
func since(version string, code uint32) func(string) uint32 {
	return func(v string) uint32 {
		if v < version {
			return uint32(types.ErrIncompatibleCNIVersion)
		}
		return code
	}
}

// with is a call that takes the try's own pod.
func with(c call) func(*try) (Outcome, error) {
	return func(t *try) (Outcome, error) { return t.do(c) }
}

// after makes an ADD and then changes something.
func after(change func(*try) error) func(*try) error {
	return func(t *try) error {
		if err := t.must(call{verb: "ADD"}); err != nil {
			return err
		}
		if change == nil {
			return nil
		}
		return change(t)
	}
}

func ips(list ...string) map[string]any { return map[string]any{"ips": list} }

func pool(name string) map[string]any { return map[string]any{"pool": name} }

// none is the fault of a case in which all is well.
const none = "none"

// cases are the lines of the table, in its order.
func cases() []Case {
	var out []Case
	for _, list := range [][]Case{addCases(), addWanted(), addKilled(), delCases(), checkCases(), gcCases(),
		statusCases(), chainCases()} {
		out = append(out, list...)
	}
	return out
}

func addCases() []Case {
	const decoding, version, field = uint32(types.ErrDecodingFailure), uint32(types.ErrIncompatibleCNIVersion),
		uint32(types.ErrUnsupportedField)
	refusedByTool := "cnitool looks at it itself"
	return []Case{
		{Verb: "ADD", Fault: none, want: always(0), run: addAndLook},
		{Verb: "ADD", Fault: "the agent does not run", phase: away, want: always(cni.CodeTryAgain),
			run: with(call{verb: "ADD"})},
		{Verb: "ADD", Fault: "network namespace vanished", want: always(cni.CodeUnknown),
			run: with(call{verb: "ADD", net: "/run/netns/no-such-namespace"})},
		{Verb: "ADD", Fault: "not a network namespace", want: always(cni.CodeEnvironment),
			run: with(call{verb: "ADD", net: "/etc/passwd"})},
		{Verb: "ADD", Fault: "the host's own namespace", want: always(cni.CodeEnvironment),
			run: func(t *try) (Outcome, error) {
				return t.do(call{verb: "ADD", net: fabric.Path(t.h.info.Namespace)})
			}},
		{Verb: "ADD", Fault: "interface name taken", want: always(cni.CodeExists), run: func(t *try) (Outcome, error) {
			if err := t.inPod(func(h *netlink.Handle) error { return addVeth(h, "eth0", "other") }); err != nil {
				return Outcome{}, err
			}
			o, err := t.do(call{verb: "ADD"})
			return o, errors.Join(err, t.inPod(func(h *netlink.Handle) error { _, err := h.LinkByName("eth0"); return err }))
		}},
		{Verb: "ADD", Fault: "a second time", prepare: after(nil), want: always(cni.CodeExists),
			run: with(call{verb: "ADD"})},
		{Verb: "ADD", Fault: "again, after the namespace was made anew", prepare: after(remake), want: always(0),
			run: with(call{verb: "ADD"})},
		{Verb: "ADD", Fault: "unknown cniVersion", want: always(version), tool: without,
			run: with(call{verb: "ADD", conf: map[string]any{"cniVersion": "9.0.0"}})},
		{Verb: "ADD", Fault: "no cniVersion", want: always(version), tool: without,
			run: with(call{verb: "ADD", conf: map[string]any{"cniVersion": nil}})},
		{Verb: "ADD", Fault: "no network name", want: always(cni.CodeConfig), tool: without,
			run: with(call{verb: "ADD", conf: map[string]any{"name": nil}})},
		{Verb: "ADD", Fault: "invalid network name", want: always(cni.CodeConfig), tool: without,
			run: with(call{verb: "ADD", conf: map[string]any{"name": "../x"}})},
		{Verb: "ADD", Fault: "no container ID", want: always(cni.CodeEnvironment), tool: without,
			run: with(call{verb: "ADD", env: []string{"CNI_CONTAINERID="}})},
		{Verb: "ADD", Fault: "invalid container ID", want: always(cni.CodeEnvironment), tool: without,
			run: with(call{verb: "ADD", env: []string{"CNI_CONTAINERID=a/b"}})},
		{Verb: "ADD", Fault: "no namespace", want: always(cni.CodeEnvironment), tool: without,
			run: with(call{verb: "ADD", env: []string{"CNI_NETNS="}})},
		{Verb: "ADD", Fault: "invalid interface name", want: always(cni.CodeEnvironment), why: refusedByTool,
			run: with(call{verb: "ADD", link: "eth/0"})},
		{Verb: "ADD", Fault: "interface name too long", want: always(cni.CodeEnvironment), why: refusedByTool,
			run: with(call{verb: "ADD", link: "sixteen-letters-"})},
		{Verb: "ADD", Fault: "unknown argument", want: always(cni.CodeEnvironment),
			run: with(call{verb: "ADD", args: "COLOUR=green"})},
		{Verb: "ADD", Fault: "unknown argument, IgnoreUnknown=1", want: always(0),
			run: with(call{verb: "ADD", args: "IgnoreUnknown=1;COLOUR=green;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"})},
		{Verb: "ADD", Fault: "ipam of another plugin", want: always(field), tool: without,
			run: with(call{verb: "ADD", conf: map[string]any{"ipam": map[string]string{"type": "host-local"}}})},
		{Verb: "ADD", Fault: "standard input is not JSON", want: always(decoding), tool: without,
			run: with(call{verb: "ADD", stdin: []byte("hello")})},
		{Verb: "ADD", Fault: "10 MB on standard input", want: always(cni.CodeConfig), tool: without,
			run: with(call{verb: "ADD", stdin: []byte(`{"cniVersion":"1.1.0","name":"plain","x":"` + strings.Repeat("x",
				10_000_000) + `"}`)})},
	}
}

// addWanted are ADDs that ask for an address or a pool, or find none.
func addWanted() []Case {
	return []Case{
		{Verb: "ADD", Fault: "a free address is asked for", want: always(0), prepare: addAndFree,
			run: func(t *try) (Outcome, error) {
				want := t.pod.prev
				o, err := t.do(call{verb: "ADD", caps: ips(string(want))})
				if err != nil || !o.ok() {
					return o, err
				}
				have, err := o.addresses(t.version)
				if err == nil && have[0].String() != string(want) {
					err = fmt.Errorf("asked for %s, got %v", want, have)
				}
				return o, err
			}},
		{Verb: "ADD", Fault: "the address is another pod's", want: always(cni.CodeDenied),
			run: func(t *try) (Outcome, error) {
				p, err := t.another()
				if err == nil {
					err = t.must(call{verb: "ADD", pod: p})
				}
				if err != nil {
					return Outcome{}, err
				}
				have, err := Outcome{Result: p.prev}.addresses(t.version)
				if err != nil {
					return Outcome{}, err
				}
				return t.do(call{verb: "ADD", caps: ips(have[0].String())})
			}},
		{Verb: "ADD", Fault: "the address lies in no pool", want: always(cni.CodeConfig),
			run: with(call{verb: "ADD", caps: ips("192.0.2.1")})},
		{Verb: "ADD", Fault: "two IPv4 addresses are asked for", want: always(cni.CodeConfig),
			run: with(call{verb: "ADD", caps: ips("10.64.0.1", "10.64.0.2")})},
		{Verb: "ADD", Fault: "no address is asked for, but a word", want: always(cni.CodeConfig),
			run: with(call{verb: "ADD", caps: ips("ten")})},
		{Verb: "ADD", Fault: "a pool that the namespace may name", want: always(0),
			run: with(call{verb: "ADD", caps: pool("few")})},
		{Verb: "ADD", Fault: "a pool that the namespace may not use", want: always(cni.CodeDenied),
			run: with(call{verb: "ADD", caps: pool("gold"), args: "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"})},
		{Verb: "ADD", Fault: "pool exhausted", want: always(cni.CodeExhausted), run: func(t *try) (Outcome, error) {
			p, err := t.another()
			if err == nil {
				err = t.must(call{verb: "ADD", pod: p, caps: pool("single")})
			}
			if err != nil {
				return Outcome{}, err
			}
			o, err := t.do(call{verb: "ADD", caps: pool("single")})
			return o, errors.Join(err, t.must(call{verb: "DEL", pod: p})) // the next try wants it
		}},
		{Verb: "ADD", Fault: "quorum gone, addresses left", phase: alone, want: always(0), run: addAndLook},
		{Verb: "ADD", Fault: "quorum gone, no address left", phase: alone, want: always(cni.CodeTryAgain),
			run: func(t *try) (Outcome, error) {
				for range 20 { // the node has a few of this pool at most
					p, err := t.another()
					if err != nil {
						return Outcome{}, err
					}
					if o, err := t.do(call{verb: "ADD", pod: p, caps: pool("few")}); err != nil || !o.ok() {
						return o, err
					}
				}
				return Outcome{}, nil
			}},
	}
}

func delCases() []Case {
	return []Case{
		{Verb: "DEL", Fault: none, prepare: after(nil), want: always(0), run: func(t *try) (Outcome, error) {
			o, err := t.do(call{verb: "DEL"})
			return o, errors.Join(err, t.inPod(func(h *netlink.Handle) error {
				if _, err := h.LinkByName("eth0"); err == nil {
					return errors.New("eth0 is still there")
				}
				return nil
			}))
		}},
		{Verb: "DEL", Fault: "a second time", prepare: after(func(t *try) error { return t.must(call{verb: "DEL"}) }),
			want: always(0), run: with(call{verb: "DEL"})},
		{Verb: "DEL", Fault: "without an ADD", want: always(0), run: with(call{verb: "DEL"})},
		{Verb: "DEL", Fault: "network namespace vanished", prepare: after(func(t *try) error { return t.h.vanish(t.pod) }),
			want: always(0), run: with(call{verb: "DEL"})},
		{Verb: "DEL", Fault: "no namespace is named", prepare: after(nil), want: always(0), tool: without,
			run: with(call{verb: "DEL", env: []string{"CNI_NETNS="}})},
		{Verb: "DEL", Fault: "not a network namespace", prepare: after(nil), want: always(0), tool: without,
			run: with(call{verb: "DEL", net: "/etc/passwd"})},
		{Verb: "DEL", Fault: "the agent does not run", phase: away, prepare: after(nil), want: always(0),
			run: func(t *try) (Outcome, error) {
				o, err := t.do(call{verb: "DEL"})
				if err == nil && !cni.HasNote(cni.NoteDir(t.h.socketDir()+"/cni.sock"), eth0(t.pod.id)) {
					err = errors.New("the agent gets no note of it")
				}
				return o, err
			}},
		{Verb: "DEL", Fault: "the agent does not run, a second time", phase: away, prepare: after(nil), want: always(0),
			run: func(t *try) (Outcome, error) {
				if err := t.must(call{verb: "DEL"}); err != nil {
					return Outcome{}, err
				}
				return t.do(call{verb: "DEL"})
			}},
		{Verb: "DEL", Fault: "quorum gone", phase: alone, prepare: after(nil), want: always(0), run: with(call{verb: "DEL"})},
		{Verb: "DEL", Fault: "prevResult cannot be read", prepare: after(nil), want: always(0), tool: without,
			run: with(call{verb: "DEL", conf: map[string]any{"prevResult": "x"}})},
		{Verb: "DEL", Fault: "unknown cniVersion", want: always(uint32(types.ErrIncompatibleCNIVersion)), tool: without,
			run: with(call{verb: "DEL", conf: map[string]any{"cniVersion": "9.0.0"}})},
		{Verb: "DEL", Fault: "invalid container ID", want: always(cni.CodeEnvironment), tool: without,
			run: with(call{verb: "DEL", env: []string{"CNI_CONTAINERID=a/b"}})},
	}
}

func checkCases() []Case {
	changed, why := since("0.4.0", cni.CodeChanged), "0.3.1 has no CHECK: cnitool refuses it too"
	check := with(call{verb: "CHECK"})
	return []Case{
		{Verb: "CHECK", Fault: none, prepare: after(nil), want: since("0.4.0", 0), why: why, run: check},
		{Verb: "CHECK", Fault: "the pod's default route deleted", prepare: after(dropRoute), want: changed, run: check},
		{Verb: "CHECK", Fault: "the pod's address deleted", prepare: after(dropAddress), want: changed, run: check},
		{Verb: "CHECK", Fault: "the pod's link deleted", prepare: after(dropLink), want: changed, run: check},
		{Verb: "CHECK", Fault: "the pod's link down", prepare: after(setDown), want: changed, run: check},
		{Verb: "CHECK", Fault: "network namespace vanished", prepare: after(func(t *try) error { return t.h.vanish(t.pod) }),
			want: since("0.4.0", cni.CodeUnknown), run: check},
		{Verb: "CHECK", Fault: "without an ADD", prepare: after(func(t *try) error { return t.must(call{verb: "DEL"}) }),
			want: since("0.4.0", cni.CodeUnknown), tool: without, run: check},
		{Verb: "CHECK", Fault: "another address in prevResult", prepare: after(func(t *try) error {
			have, err := Outcome{Result: t.pod.prev}.addresses(t.version)
			if err == nil {
				t.pod.prev = []byte(strings.Replace(string(t.pod.prev), have[0].String(), "10.64.15.254", 1))
			}
			return err
		}), want: changed, tool: without, run: check},
		{Verb: "CHECK", Fault: "no prevResult", prepare: after(nil), want: since("0.4.0", cni.CodeConfig), tool: without,
			run: with(call{verb: "CHECK", conf: map[string]any{"prevResult": nil}})},
		{Verb: "CHECK", Fault: "the agent does not run", phase: away, prepare: after(nil),
			want: since("0.4.0", cni.CodeTryAgain), run: check},
		{Verb: "CHECK", Fault: "quorum gone", phase: alone, prepare: after(nil), want: since("0.4.0", 0), run: check},
	}
}

func gcCases() []Case {
	return []Case{
		{Verb: "GC", Fault: "one attachment leaked", prepare: after(nil), want: since("1.1.0", 0), tool: without,
			run: func(t *try) (Outcome, error) {
				leaked, err := t.another()
				if err == nil {
					err = t.must(call{verb: "ADD", pod: leaked})
				}
				if err != nil {
					return Outcome{}, err
				}
				o, err := t.do(call{verb: "GC", conf: valid(t.pod)})
				if err == nil && o.ok() {
					err = errors.Join(t.has(t.pod, true), t.has(leaked, false))
				}
				return o, err
			}},
		{Verb: "GC", Fault: "attachment of another network", want: since("1.1.0", 0), tool: without,
			run: func(t *try) (Outcome, error) {
				if err := t.must(call{verb: "ADD", conf: map[string]any{"name": "other"}}); err != nil {
					return Outcome{}, err
				}
				o, err := t.do(call{verb: "GC", conf: valid()})
				return o, errors.Join(err, t.has(t.pod, true))
			}},
		{Verb: "GC", Fault: "no list of valid attachments", prepare: after(nil), want: since("1.1.0", 0), tool: itself,
			why: "what runs stays; cnitool first deletes what it remembers, and calls GC without a list in 1.1.0 only",
			run: func(t *try) (Outcome, error) {
				o, err := t.do(call{verb: "GC"})
				if err == nil && !t.byTool {
					err = t.has(t.pod, true)
				}
				return o, err
			}},
		{Verb: "GC", Fault: "the agent does not run", phase: away, want: since("1.1.0", 0), tool: without,
			run: func(t *try) (Outcome, error) {
				return t.do(call{verb: "GC", conf: valid(t.pod)})
			}},
	}
}

func statusCases() []Case {
	why := "before 1.1.0 cnitool says yes without asking the plugin"
	status := with(call{verb: "STATUS"})
	return []Case{
		{Verb: "STATUS", Fault: none, want: since("1.1.0", 0), tool: itself, why: why, run: status},
		{Verb: "STATUS", Fault: "the agent does not run", phase: away, want: since("1.1.0", cni.CodeUnavailable),
			tool: itself, why: why, run: status},
		{Verb: "STATUS", Fault: "quorum gone, addresses left", phase: alone, want: since("1.1.0", 0), tool: itself,
			why: why, run: status},
		{Verb: "STATUS", Fault: "the default pool is drained", phase: drained, want: since("1.1.0", cni.CodeUnavailable),
			tool: itself, why: why, run: status},
		{Verb: "VERSION", Fault: none, want: always(0), tool: without, run: func(t *try) (Outcome, error) {
			o, err := t.do(call{verb: "VERSION"})
			if err == nil && !strings.Contains(string(o.Result), `"supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]`) {
				err = fmt.Errorf("it says %s", o.Result)
			}
			return o, err
		}},
	}
}

// addAndLook makes an ADD, and holds its result against the kernel.
func addAndLook(t *try) (Outcome, error) {
	o, err := t.do(call{verb: "ADD"})
	if err != nil || !o.ok() {
		return o, err
	}
	have, err := o.addresses(t.version)
	if err != nil {
		return o, err
	}
	kernel, err := fabric.Addresses(t.pod.path)
	if err == nil && (len(have) != 2 || !equalSets(have, kernel)) {
		err = fmt.Errorf("the result says %v, the pod has %v", have, kernel)
	}
	return o, err
}

func equalSets(a, b []netip.Addr) bool {
	in := map[netip.Addr]bool{}
	for _, x := range a {
		in[x] = true
	}
	for _, x := range b {
		if !in[x] {
			return false
		}
	}
	return len(a) == len(b)
}

// addAndFree finds an address that is free and in a block of this node; the pod's prev holds its text.
func addAndFree(t *try) error {
	if err := t.must(call{verb: "ADD"}); err != nil {
		return err
	}
	have, err := Outcome{Result: t.pod.prev}.addresses(t.version)
	if err == nil {
		err = t.must(call{verb: "DEL"})
	}
	if err == nil {
		t.pod.prev = []byte(have[0].String())
	}
	return err
}

// has tells whether a pod still has its interface.
func (t *try) has(p *pod, want bool) error {
	links, err := fabric.Links(fabric.PodNS(t.h.lab.Spec.Name, node, p.name))
	if err == nil && (len(links) > 0) != want {
		err = fmt.Errorf("pod %s has the links %v", p.name, links)
	}
	return err
}

// valid is GC's list.
func valid(pods ...*pod) map[string]any {
	list := []map[string]string{}
	for _, p := range pods {
		list = append(list, map[string]string{"containerID": p.id, "ifname": "eth0"})
	}
	return map[string]any{"cni.dev/valid-attachments": list}
}

// inPod works in the pod's namespace.
func (t *try) inPod(f func(*netlink.Handle) error) error {
	return fabric.In(fabric.PodNS(t.h.lab.Spec.Name, node, t.pod.name), func() error {
		h, err := netlink.NewHandle()
		if err != nil {
			return err
		}
		defer h.Close()
		return f(h)
	})
}

func addVeth(h *netlink.Handle, name, peer string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer})
}

// eth0 works with the pod's interface.
func (t *try) eth0(f func(*netlink.Handle, netlink.Link) error) error {
	return t.inPod(func(h *netlink.Handle) error {
		l, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return f(h, l)
	})
}

func dropLink(t *try) error {
	return t.eth0(func(h *netlink.Handle, l netlink.Link) error { return h.LinkDel(l) })
}

func setDown(t *try) error {
	return t.eth0(func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetDown(l) })
}

func dropAddress(t *try) error {
	return t.eth0(func(h *netlink.Handle, l netlink.Link) error {
		list, err := h.AddrList(l, netlink.FAMILY_V4)
		if err != nil || len(list) == 0 {
			return errors.Join(err, errors.New("no address to delete"))
		}
		return h.AddrDel(l, &list[0])
	})
}

func dropRoute(t *try) error {
	return t.eth0(func(h *netlink.Handle, l netlink.Link) error {
		list, err := h.RouteList(l, netlink.FAMILY_V4)
		for i, r := range list {
			if r.Dst == nil || r.Dst.IP.IsUnspecified() {
				return h.RouteDel(&list[i])
			}
		}
		return errors.Join(err, errors.New("no default route to delete"))
	})
}

// remake takes the pod's namespace away and makes another of the same name, as after a restart of the host.
func remake(t *try) error {
	if err := t.h.vanish(t.pod); err != nil {
		return err
	}
	// The kernel takes the links of a namespace away a moment after it.
	if err := t.h.linkGone(t.ctx, t.pod.id); err != nil {
		return err
	}
	return fabric.AddPod(t.h.lab.Spec.Name, node, t.pod.name)
}
