package main

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/proto"
	"rsc.io/qr"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/cli"
)

// peerKeepalive is the keepalive of a plain peer, in seconds: it keeps the ways through its NAT open, so that each
// carrier can take it over.
const peerKeepalive = 25

// privateKeyHere stands where the private key belongs when the peer has made its own.
const privateKeyHere = "PUT-THE-PRIVATE-KEY-HERE"

func newPeerCmd(g *globals) *cobra.Command {
	return cli.Group("peer", "Plain WireGuard peers: phones, laptops, routers", newPeerAddCmd(g), newPeerListCmd(g),
		newPeerRemoveCmd(g))
}

func newPeerAddCmd(g *globals) *cobra.Command {
	var publicKey, qrWhen string
	var allowed, via []string
	var expires time.Duration
	var replace bool
	c := &cobra.Command{
		Use: "add NAME", Short: "Admit a host that runs WireGuard and no skein",
		Long: "Admit a host that runs a stock WireGuard and no skein, and print its configuration, on a terminal with a QR " +
			"code\n" +
			"for the WireGuard app. Some nodes carry it: it has a session with one of them, and another takes it over when " +
			"that\n" +
			"one is away. Without --public-key the key pair is made here; the private key is printed, and neither sent nor " +
			"kept.",
		Example: "  skein peer add phone --expires 24h\n  skein peer add office --public-key KEY --allowed-ips " +
			"192.168.8.0/24 --via gw1,gw2",
		Args: cli.Exactly(1, "one name"),
		RunE: func(c *cobra.Command, args []string) error {
			if !slices.Contains([]string{"auto", "always", "never"}, qrWhen) {
				return cli.UsageError{Err: fmt.Errorf("--qr %s: allowed: auto, always, never", qrWhen)}
			}
			if c.Flags().Changed("expires") && expires <= 0 {
				return cli.UsageError{Err: fmt.Errorf("--expires %s: want a time from now, such as 24h", expires)}
			}
			private, public, err := peerKeys(publicKey)
			if err != nil {
				return err
			}
			for i, text := range allowed {
				if a, err := netip.ParseAddr(text); err == nil {
					allowed[i] = netip.PrefixFrom(a, a.BitLen()).String()
				}
			}
			r, err := g.client().AddPlainPeer(c.Context(), &skeinv1.AddPlainPeerRequest{
				Name: args[0], PublicKey: public, AllowedIps: allowed, LifetimeNanos: int64(expires), Via: via,
				Replace: replace})
			if err != nil {
				return g.plain(err)
			}
			for _, w := range r.GetWarnings() {
				fmt.Fprintln(c.ErrOrStderr(), wrap("warning: "+w, 4))
			}
			text := peerConfig(r, private)
			if g.output == "json" {
				return printAdded(c.OutOrStdout(), r, text)
			}
			out := c.OutOrStdout()
			fmt.Fprint(out, text)
			if private != "" && (qrWhen == "always" || qrWhen == "auto" && isTerminal(out)) {
				return printQR(out, text)
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&publicKey, "public-key", "", "the peer's own public key, in base64 (default: a key pair is made here)")
	f.StringSliceVar(&allowed, "allowed-ips", nil, "private networks behind the peer, such as 192.168.8.0/24")
	f.StringSliceVar(&via, "via", nil,
		"nodes that may carry it, the first one first (default: up to three with public addresses)")
	f.DurationVar(&expires, "expires", 0, "how long it is admitted for, such as 24h (default: until it is removed)")
	f.BoolVar(&replace, "replace", false, "give the peer of that name a new configuration; it keeps its addresses")
	f.StringVar(&qrWhen, "qr", "auto", "print a QR code: auto (on a terminal), always, never")
	return c
}

// peerKeys are the peer's own: made here, or the public one as it was given.
func peerKeys(given string) (private string, public []byte, err error) {
	if given != "" {
		public, err := base64.StdEncoding.DecodeString(given)
		if err != nil || len(public) != len(identity.WireGuardKey{}) {
			return "", nil,
				cli.UsageError{Err: fmt.Errorf("--public-key %.60q is not a WireGuard key: want 44 characters, as "+
					"`wg pubkey` prints them", given)}
		}
		return "", public, nil
	}
	key, err := identity.NewWireGuardKey()
	if err != nil {
		return "", nil, err
	}
	pub, err := key.Public()
	return base64.StdEncoding.EncodeToString(key[:]), pub[:], err
}

// peerConfig is the configuration as wg-quick and the WireGuard apps read it.
func peerConfig(r *skeinv1.AddPlainPeerResponse, private string) string {
	var b strings.Builder
	p := r.GetPeer()
	psk := base64.StdEncoding.EncodeToString(r.GetPresharedKey())
	until := ""
	if p.GetExpiresAt() != 0 {
		until = ", until " + time.Unix(0, p.GetExpiresAt()).UTC().Format("2006-01-02 15:04 MST")
	}
	if private == "" {
		private = privateKeyHere
	}
	fmt.Fprintf(&b,
		"# %s, plain WireGuard peer of a skein mesh%s\n[Interface]\nPrivateKey = %s\nAddress = %s/32, %s/128\n",
		p.GetName(), until, private, p.GetIpv4(), p.GetIpv6())
	section := func(comment string, key []byte, endpoint, allowed string) {
		fmt.Fprintf(&b, "\n# %s\n[Peer]\nPublicKey = %s\nPresharedKey = %s\n", comment,
			base64.StdEncoding.EncodeToString(key), psk)
		if allowed != "" {
			fmt.Fprintf(&b, "AllowedIPs = %s\n", allowed)
		}
		fmt.Fprintf(&b, "Endpoint = %s\nPersistentKeepalive = %d\n", endpoint, peerKeepalive)
	}
	for i, e := range r.GetEndpoints() {
		if i == 0 {
			section("The mesh: the node that carries this peer. It is asked at "+e.GetNode()+" first, and moves by itself.",
				p.GetCarrierKey(), e.GetAddress(), strings.Join(r.GetRoutes(), ", "))
		}
		section("Keeps the way to "+e.GetNode()+" open, which may take this peer over. It carries no packets.",
			e.GetWireguardKey(), e.GetAddress(), "")
	}
	return b.String()
}

// printAdded writes the answer as JSON, with the configuration in it.
func printAdded(w io.Writer, r *skeinv1.AddPlainPeerResponse, text string) error {
	type added struct {
		Peer          jsonMessage `json:"peer"`
		Index         uint64      `json:"index"`
		Configuration string      `json:"configuration"`
		Warnings      []string    `json:"warnings"`
	}
	return cli.PrintJSON(w, added{jsonMessage{r.GetPeer()}, r.GetIndex(), text, append([]string{}, r.GetWarnings()...)})
}

// jsonMessage is a message inside of other JSON.
type jsonMessage struct{ proto.Message }

// MarshalJSON writes it as the API does.
func (m jsonMessage) MarshalJSON() ([]byte, error) {
	var b strings.Builder
	err := printProto(&b, m.Message)
	return []byte(b.String()), err
}

// printQR draws a configuration as a QR code, two rows of modules a line. Comments are left out: the fewer bytes, the
// larger the modules.
func printQR(w io.Writer, text string) error {
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") && strings.TrimSpace(line) != "" {
			lines = append(lines, line)
		}
	}
	code, err := qr.Encode(strings.Join(lines, ""), qr.L)
	if err != nil {
		return errors.New("the configuration is too long for a QR code: copy it, or name fewer nodes with --via")
	}
	const quiet = 2 // light modules around it; dark terminals make them from full blocks
	light := func(x, y int) bool { return !code.Black(x, y) }
	var b strings.Builder
	for y := -quiet; y < code.Size+quiet; y += 2 {
		for x := -quiet; x < code.Size+quiet; x++ {
			switch upper, lower := light(x, y), light(x, y+1) && y+1 < code.Size+quiet; {
			case upper && lower:
				b.WriteString("█")
			case upper:
				b.WriteString("▀")
			case lower:
				b.WriteString("▄")
			default:
				b.WriteString(" ")
			}
		}
		b.WriteString("\n")
	}
	_, err = fmt.Fprint(w, "\n", b.String())
	return err
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func newPeerListCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "Plain peers, and who carries them",
		Example: "  skein peer list\n  skein peer list -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().PlainPeers(c.Context(), &skeinv1.PlainPeersRequest{})
			return g.show(c, r, err, func(w io.Writer) {
				if len(r.GetPeers()) == 0 {
					fmt.Fprintln(w, "no plain peers; `skein peer add` admits one")
					return
				}
				printPlainPeers(w, r.GetPeers())
			})
		},
	}
}

func printPlainPeers(w io.Writer, peers []*skeinv1.PlainPeerView) {
	t := table{head: []string{"PLAIN PEER", "IPV4", "IPV6", "NETWORKS", "CARRIED BY", "CARRIERS", "EXPIRES"}}
	for _, p := range peers {
		expires := "never"
		if at := p.GetPeer().GetExpiresAt(); at != 0 {
			expires = "over"
			if left := time.Until(time.Unix(0, at)); left > 0 {
				expires = "in " + left.Round(time.Second).String()
			}
		}
		holder := dash(p.GetHolderName())
		if p.GetHolder() != "" && !p.GetAlive() {
			holder += " (away)"
		}
		t.add(p.GetPeer().GetName(), p.GetPeer().GetIpv4(), p.GetPeer().GetIpv6(),
			dash(strings.Join(p.GetPeer().GetAllowedIps(), ",")), holder,
			strings.Join(p.GetCarriers(), ","), expires)
	}
	t.print(w)
	for _, p := range peers {
		if p.GetProblem() != "" {
			fmt.Fprintln(w, wrap(p.GetPeer().GetName()+": "+p.GetProblem(), 4))
		}
	}
}

func newPeerRemoveCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "remove NAME", Short: "Throw a plain peer out", Example: "  skein peer remove phone", Args: cli.Exactly(1,
			"one plain peer's name"),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := g.client().RemovePlainPeer(c.Context(), &skeinv1.RemovePlainPeerRequest{Name: args[0]})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "plain peer %s removed, as of event %d: no node carries it any more\n", args[0],
					r.GetIndex())
			})
		},
	}
}
