package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newIPCmd(g *globals) *cobra.Command {
	return cli.Group("ip", "Addresses of pods", newIPWhoCmd(g), newIPListCmd(g), newIPReserveCmd(g), newIPReleaseCmd(g),
		newIPReservedCmd(g))
}

const (
	oneAddress = "one address"
	atHelp     = "then instead of now: an index, a time (2026-01-02T15:04:05Z, \"2026-01-02 15:04:05\", 15:04:05) or an " +
		"age (5m)"
)

func newIPWhoCmd(g *globals) *cobra.Command {
	var at string
	c := &cobra.Command{
		Use: "who ADDRESS", Short: "Who has an address, or had it then, and which event says so",
		Example: "  skein ip who 10.64.0.5\n  skein ip who 10.64.0.5 --at 14:03:05\n  skein ip who 10.64.0.5 --at 17",
		Args:    cli.Exactly(1, oneAddress),
		RunE:    func(c *cobra.Command, args []string) error { return g.who(c, args[0], at, false) },
	}
	c.Flags().StringVar(&at, "at", "", atHelp)
	return c
}

func newExplainAddressCmd(g *globals) *cobra.Command {
	var at string
	c := &cobra.Command{
		Use: "address ADDRESS", Short: "Who has an address, why, and who had it before",
		Example: "  skein explain address 10.64.0.5\n  skein explain address 10.64.0.5 --at 10m",
		Args:    cli.Exactly(1, oneAddress),
		RunE:    func(c *cobra.Command, args []string) error { return g.who(c, args[0], at, true) },
	}
	c.Flags().StringVar(&at, "at", "", atHelp)
	return c
}

func (g *globals) who(c *cobra.Command, address, at string, history bool) error {
	a, err := parseAddress(address)
	if err != nil {
		return err
	}
	r := &skeinv1.WhoRequest{Address: a}
	if r.AtIndex, r.AtTime, err = parseAt(at, time.Now()); err != nil {
		return err
	}
	w, err := g.client().Who(c.Context(), r)
	return g.show(c, w, err, func(out io.Writer) { printWho(out, w, at != "", history, g.names(c)) })
}

func parseAddress(s string) (string, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return "", cli.UsageError{Err: fmt.Errorf("%q is not an IP address", s)}
	}
	return a.Unmap().String(), nil
}

// parseAt reads an index, a time or an age; empty is 0, 0, for now. Times without a zone are this host's, and a time of
// day is the last one that was.
func parseAt(s string, now time.Time) (index uint64, ns int64, err error) {
	if s == "" {
		return 0, 0, nil
	}
	if n, err := strconv.ParseUint(s, 10, 64); err == nil && n > 0 {
		return n, 0, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d > 0 {
		return 0, now.Add(-d).UnixNano(), nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime} { // fractions of a second are read by both
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil && t.UnixNano() > 0 {
			return 0, t.UnixNano(), nil
		}
	}
	if t, err := time.ParseInLocation(time.TimeOnly, s, now.Location()); err == nil {
		t = time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), now.Location())
		if t.After(now) {
			t = t.AddDate(0, 0, -1)
		}
		return 0, t.UnixNano(), nil
	}
	return 0, 0, cli.UsageError{Err: fmt.Errorf("--at %s: want an index such as 17, a time such as 2026-01-02T15:04:05Z, "+
		"\"2026-01-02 15:04:05\" or 15:04:05, or an age such as 5m", s)}
}

func printWho(w io.Writer, r *skeinv1.WhoResponse, then, history bool, names *strings.Replacer) {
	line := func(k, format string, a ...any) {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", k, names.Replace(fmt.Sprintf(format, a...))), 11))
	}
	line("address", "%s: %s", r.GetAddress(), r.GetSays())
	if then {
		line("at", "event %d, %s", r.GetAtIndex(), instant(r.GetAtTime()))
	}
	switch p := r.GetPod(); {
	case p != nil:
		line("pod", "%s", holderText(p))
	case r.GetPodUnknown() != "":
		line("pod", "not known: %s", r.GetPodUnknown())
	case r.GetKind() == "block":
		line("pod", "none")
	}
	if r.GetNode() != "" || r.GetNodeId() != "" {
		fmt.Fprintf(w, "%-10s %s (%s)\n", "node", dash(r.GetNode()), r.GetNodeId())
	}
	if b := r.GetBlock(); b != nil {
		line("block", "%s, number %d of pool %s", blockText(b), b.GetNumber(), b.GetPool())
	} else if r.GetPool() != "" {
		line("pool", "%s", r.GetPool())
	}
	if r.GetEventIndex() > 0 {
		what := fmt.Sprintf("by event %d", r.GetEventIndex())
		if r.GetEvent() != "" { // else it is older than what this node keeps
			what += ", " + r.GetEvent()
		}
		line("decided", "%s, %s", what, instant(r.GetEventTime()))
	}
	if !history {
		return
	}
	for i, l := range r.GetHistory() {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", only(i == 0, "history"), names.Replace(l)), 15))
	}
	if len(r.GetHistory()) == 0 {
		line("history", "nothing is kept of it")
	}
}

// holderText tells which pod, which container, and for how long.
func holderText(p *skeinv1.Holder) string {
	text := fmt.Sprintf("%s, %s of container %.12s", podName(p), p.GetInterface(), p.GetContainerId())
	switch {
	case p.GetState() == "adopted":
		text += ", found in the kernel at a start"
	case p.GetUntil() != 0:
		return text + fmt.Sprintf(", from %s until %s", instant(p.GetSince()), instant(p.GetUntil()))
	}
	if p.GetSince() != 0 {
		text += ", since " + instant(p.GetSince())
	}
	return text
}

func podName(p *skeinv1.Holder) string {
	if p.GetPod() == "" {
		return "(no name)"
	}
	return p.GetNamespace() + "/" + p.GetPod()
}

func newIPListCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "This node's pods and their addresses",
		Example: "  skein ip list\n  skein ip list -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Pods(c.Context(), &skeinv1.PodsRequest{})
			return g.show(c, r, err, func(w io.Writer) { printPods(w, r.GetPods()) })
		},
	}
}

func printPods(w io.Writer, pods []*skeinv1.PodView) {
	if len(pods) == 0 {
		fmt.Fprintln(w, "no pod of this node has an address")
		return
	}
	v4 := slices.ContainsFunc(pods, func(p *skeinv1.PodView) bool { return p.GetHolder().GetIpv4() != "" })
	v6 := slices.ContainsFunc(pods, func(p *skeinv1.PodView) bool { return p.GetHolder().GetIpv6() != "" })
	row := func(pod, ipv4, ipv6 string, rest ...string) []string {
		out := []string{pod}
		if v4 {
			out = append(out, ipv4)
		}
		if v6 {
			out = append(out, ipv6)
		}
		return append(out, rest...)
	}
	t := table{head: row("POD", "IPV4", "IPV6", "POOL", "STATE", "HOST LINK")}
	for _, p := range pods {
		h := p.GetHolder()
		at := h.GetSince()
		if h.GetUntil() != 0 {
			at = h.GetUntil()
		}
		t.add(row(podName(h), dash(h.GetIpv4()), dash(h.GetIpv6()), dash(p.GetPool()), dash(h.GetState())+" "+since(at),
			dash(p.GetHostInterface()))...)
	}
	t.print(w)
}

func newIPReserveCmd(g *globals) *cobra.Command {
	var owner string
	r := &skeinv1.ReserveAddressRequest{}
	c := &cobra.Command{
		Use: "reserve ADDRESS", Short: "Keep an address for one pod, wherever it runs",
		Example: "  skein ip reserve 10.64.0.5 --for mail/postfix-0", Args: cli.Exactly(1, oneAddress),
		RunE: func(c *cobra.Command, args []string) error {
			var err error
			if r.Address, err = parseAddress(args[0]); err != nil {
				return err
			}
			if r.Namespace, r.Pod, err = parsePod(owner); err != nil {
				return err
			}
			s, err := g.client().ReserveAddress(c.Context(), r)
			return g.show(c, s, err, func(w io.Writer) {
				a := s.GetAddress()
				fmt.Fprintln(w, wrap(fmt.Sprintf("%s of pool %s is kept for %s/%s, by event %d", prefixes(a.GetIpv4(), a.GetIpv6()),
					a.GetPool(), a.GetNamespace(), a.GetPod(), a.GetIndex()), 4))
			})
		},
	}
	c.Flags().StringVar(&owner, "for", "", "NAMESPACE/POD that gets it")
	c.Flags().StringVar(&r.Pool, "pool", "", "the pool it is of, if that is not clear")
	return c
}

func parsePod(s string) (namespace, pod string, err error) {
	namespace, pod, ok := strings.Cut(s, "/")
	switch {
	case s == "":
		return "", "", cli.UsageError{Err: errors.New("--for is missing: name the pod as NAMESPACE/POD")}
	case !ok || namespace == "" || pod == "" || strings.Contains(pod, "/"):
		return "", "", cli.UsageError{Err: fmt.Errorf("--for %s: want NAMESPACE/POD, such as mail/postfix-0", s)}
	}
	return namespace, pod, nil
}

func newIPReleaseCmd(g *globals) *cobra.Command {
	r := &skeinv1.ReleaseAddressRequest{}
	c := &cobra.Command{
		Use: "release ADDRESS", Short: "End the reservation of an address", Example: "  skein ip release 10.64.0.5",
		Args: cli.Exactly(1, oneAddress),
		RunE: func(c *cobra.Command, args []string) error {
			var err error
			if r.Address, err = parseAddress(args[0]); err != nil {
				return err
			}
			s, err := g.client().ReleaseAddress(c.Context(), r)
			return g.show(c, s, err, func(w io.Writer) {
				fmt.Fprintf(w, "%s is no longer kept for a pod, as of event %d\n", args[0], s.GetIndex())
			})
		},
	}
	c.Flags().BoolVar(&r.Force, "force", false, "also while a node holds it")
	c.Flags().StringVar(&r.Pool, "pool", "", "the pool it is of, if that is not clear")
	return c
}

func newIPReservedCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "reserved", Short: "Addresses that are kept for pods", Example: "  skein ip reserved", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Statics(c.Context(), &skeinv1.StaticsRequest{})
			return g.show(c, r, err, func(w io.Writer) {
				if len(r.GetAddresses()) == 0 {
					fmt.Fprintln(w, "no address is kept for a pod")
					return
				}
				printStatics(w, r.GetAddresses(), g.names(c))
			})
		},
	}
}

func printStatics(w io.Writer, all []*skeinv1.StaticAddress, names *strings.Replacer) {
	t := table{head: []string{"KEPT ADDRESS", "FOR", "POOL", "HELD BY", "SINCE", "EVENT"}}
	for _, s := range all {
		t.add(prefixes(s.GetIpv4(), s.GetIpv6()), s.GetNamespace()+"/"+s.GetPod(), s.GetPool(),
			dash(names.Replace(s.GetNodeId())), since(s.GetSince()), fmt.Sprint(s.GetIndex()))
	}
	t.print(w)
}
