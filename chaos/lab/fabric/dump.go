package fabric

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
)

// Dump writes what the kernel holds in a namespace, for people to read: links, addresses, rules,
// routes, neighbours, nftables and tracked connections. What cannot be read is said in its place.
func Dump(ns string, w io.Writer) error {
	return errors.Join(
		on(ns, func(h *netlink.Handle) error {
			dumpLinks(h, w)
			dumpRoutes(h, w)
			dumpFlows(h, w)
			return nil
		}),
		dumpTables(ns, w),
	)
}

func section[T any](w io.Writer, title string, list []T, err error, line func(T) string) {
	fmt.Fprintf(w, "# %s\n", title)
	if err != nil {
		fmt.Fprintf(w, "(cannot be read: %v)\n", err)
	}
	for _, x := range list {
		fmt.Fprintln(w, line(x))
	}
	fmt.Fprintln(w)
}

func dumpLinks(h *netlink.Handle, w io.Writer) {
	links, err := h.LinkList()
	names := map[int]string{}
	section(w, "links", links, err, func(l netlink.Link) string {
		a := l.Attrs()
		names[a.Index] = a.Name
		line := fmt.Sprintf("%d: %s %s mtu %d %s", a.Index, a.Name, l.Type(), a.MTU, a.OperState)
		if s := a.Statistics; s != nil {
			line += fmt.Sprintf(" rx %d packets %d dropped, tx %d packets %d dropped", s.RxPackets, s.RxDropped,
				s.TxPackets, s.TxDropped)
		}
		return line
	})
	addrs, err := h.AddrList(nil, netlink.FAMILY_ALL)
	section(w, "addresses", addrs, err, func(a netlink.Addr) string { return names[a.LinkIndex] + " " + a.IPNet.String() })
	neighs, err := h.NeighList(0, netlink.FAMILY_ALL)
	section(w, "neighbours", neighs, err, func(n netlink.Neigh) string {
		return fmt.Sprintf("%s %s %s state %#x", names[n.LinkIndex], n.IP, n.HardwareAddr, n.State)
	})
}

func dumpRoutes(h *netlink.Handle, w io.Writer) {
	rules, err := h.RuleList(netlink.FAMILY_ALL)
	section(w, "rules", rules, err, func(r netlink.Rule) string { return r.String() })
	// A zero table in the filter means all tables.
	for title, family := range map[string]int{"routes": netlink.FAMILY_V4, "routes, IPv6": netlink.FAMILY_V6} {
		routes, err := h.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_TABLE)
		section(w, title, routes, err, func(r netlink.Route) string { return r.String() })
	}
}

func dumpFlows(h *netlink.Handle, w io.Writer) {
	for title, family := range map[string]netlink.InetFamily{"connections": netlink.FAMILY_V4,
		"connections, IPv6": netlink.FAMILY_V6} {
		flows, err := h.ConntrackTableList(netlink.ConntrackTable, family)
		section(w, title, flows, err, func(f *netlink.ConntrackFlow) string { return f.String() })
	}
}

func dumpTables(ns string, w io.Writer) error {
	fd, err := open(ns)
	if err != nil {
		return err
	}
	defer fd.Close()
	conn, err := nftables.New(nftables.WithNetNSFd(int(fd)))
	if err != nil {
		return fmt.Errorf("nftables in %s: %w", ns, err)
	}
	tables, err := conn.ListTables()
	section(w, "nftables", tables, err, func(t *nftables.Table) string {
		var b strings.Builder
		fmt.Fprintf(&b, "table family %d %s", t.Family, t.Name)
		dumpTable(conn, t, &b)
		return b.String()
	})
	return nil
}

func dumpTable(conn *nftables.Conn, t *nftables.Table, b *strings.Builder) {
	sets, err := conn.GetSets(t)
	if err != nil {
		fmt.Fprintf(b, "\n  (sets cannot be read: %v)", err)
	}
	for _, s := range sets {
		elements, err := conn.GetSetElements(s)
		if err != nil {
			fmt.Fprintf(b, "\n  set %s (cannot be read: %v)", s.Name, err)
			continue
		}
		fmt.Fprintf(b, "\n  set %s, %d elements:", s.Name, len(elements))
		for _, e := range elements[:min(len(elements), 200)] {
			fmt.Fprintf(b, " %x", e.Key)
		}
	}
	chains, err := conn.ListChainsOfTableFamily(t.Family)
	if err != nil {
		fmt.Fprintf(b, "\n  (chains cannot be read: %v)", err)
	}
	for _, c := range chains {
		if c.Table.Name != t.Name {
			continue
		}
		fmt.Fprintf(b, "\n  chain %s %s", c.Name, c.Type)
		rules, err := conn.GetRules(t, c)
		if err != nil {
			fmt.Fprintf(b, " (cannot be read: %v)", err)
		}
		for _, r := range rules {
			b.WriteString("\n   ")
			for _, e := range r.Exprs {
				b.WriteString(" " + describe(e))
			}
		}
	}
}

// describe writes an nftables expression down, tersely.
func describe(e expr.Any) string {
	name := strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", e), "*expr."))
	return name + strings.TrimPrefix(fmt.Sprintf("%+v", e), "&")
}
