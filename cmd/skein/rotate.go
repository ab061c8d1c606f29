package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newRotateCmd(g *globals) *cobra.Command {
	key := &cobra.Command{
		Use: "gossip-key", Short: "Encrypt gossip with a new key",
		Long: "Encrypt gossip with a new key, which the leader makes. Each node uses it some seconds after it has it,\n" +
			"and still reads what the two keys before encrypt, so nothing of gossip is lost. A node that was away gets\n" +
			"the keys with the log.",
		Example: "  skein cluster rotate gossip-key", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().RotateGossipKey(c.Context(), &skeinv1.RotateGossipKeyRequest{})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "gossip key %s, as of event %d\n", gossipKeysText(r.GetKeys()), r.GetIndex())
			})
		},
	}
	return cli.Group("rotate", "Give the cluster new keys", key)
}

// gossipKeysText says which gossip keys are agreed, and which of them is used.
func gossipKeysText(k *skeinv1.GossipKeysView) string {
	text := k.GetAgreed() + " is agreed and used"
	if k.GetUsed() != k.GetAgreed() {
		text = k.GetAgreed() + " is agreed and used in a moment, until then " + k.GetUsed()
	}
	if len(k.GetAccepted()) > 0 {
		text += "; still read: " + strings.Join(k.GetAccepted(), " ")
	}
	return text
}
