package agent

import (
	"context"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// announceEvery is how often a node tries to say which events it can fold.
const announceEvery = 5 * time.Second

// announceSchema tells the log which events this node folds, when its version has changed since it was admitted: the
// leader decides nothing that a server could not fold.
func (a *Agent) announceSchema(ctx context.Context) {
	for {
		n := a.self()
		c := schemaNews(n)
		if n != nil && c == nil {
			return
		}
		if c != nil {
			_, err := a.propose(ctx, c)
			if err == nil {
				a.log.Info("told the cluster which events this version folds", "from", events.SchemaMin, "to", events.SchemaMax)
				return
			}
			a.log.Debug("tell the cluster which events this version folds", "error", err)
		}
		if !pause.For(ctx, announceEvery) {
			return
		}
	}
}

// schemaNews is what a node has to tell the log about its version; nil: nothing.
func schemaNews(n *skeinv1.Node) *skeinv1.Command {
	if n == nil || n.GetMinSchema() == events.SchemaMin && n.GetMaxSchema() == events.SchemaMax {
		return nil
	}
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
		NodeId: n.GetId(), MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax,
	}}}
}
