package main

import (
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newNodeRotateKeyCmd(g *globals) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "rotate-key", Short: "Give this host another WireGuard key",
		Long: "Give this host another WireGuard key. Its peers get to know the next key first, so that the tunnels\n" +
			"carry on: packets wait for as long as a handshake takes, and none is lost. A peer that is away hears of\n" +
			"it when it is back. The host's identity stays: for another one, let it leave and join as a new node.",
		Example: "  skein node rotate-key", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().RotateNodeKey(c.Context(), &skeinv1.RotateNodeKeyRequest{Force: force})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "WireGuard key %s, as of event %d\npeers that were ready: %d; agreed %s after the change\n",
					base64.StdEncoding.EncodeToString(r.GetWireguardKey()), r.GetIndex(), r.GetReady(),
					time.Duration(r.GetTookNanos()).Round(time.Millisecond))
				if len(r.GetLate()) > 0 {
					fmt.Fprintf(w, "not ready, and cut off for some seconds: %s\n", strings.Join(r.GetLate(), ", "))
				}
			})
		},
	}
	c.Flags().BoolVar(&force, "force", false, "also where configurations of plain peers name the present key")
	return c
}
