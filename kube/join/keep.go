package join

import (
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	// Lifetime of a token. A Secret that is read by somebody, from a backup say, is worth nothing soon after the last host
	// has joined.
	Lifetime = time.Hour
	renew    = 15 * time.Minute // before its end
	spare    = 2                // uses beyond the Nodes that wait
	mostUses = 1000
)

// Kept is a token that the servers keep in a Secret.
type Kept struct {
	Text    string         // in the Secret
	Cluster string         // that the text is of
	Token   *skeinv1.Token // as the log has it; nil: it does not know it
}

// Keep decides whether a new token is to be made for the Nodes that wait, and for how many uses; 0: none. Then good is
// how long the one that is there will do. Where no Node waits the old one just ends.
func Keep(k Kept, cluster string, waiting int, now time.Time) (uses uint32, good time.Duration) {
	if waiting == 0 {
		return 0, Lifetime
	}
	if k.Text != "" && k.Cluster == cluster && k.Token != nil && int(k.Token.GetUsesLeft()) >= min(waiting, mostUses/2) {
		if good := time.Unix(0, k.Token.GetExpiresAt()).Sub(now) - renew; good > 0 {
			return 0, good
		}
	}
	return uint32(min(waiting+spare, mostUses)), 0
}

// Adopt decides whether a member of a mesh writes its ID into the claim: where there is a ConfigMap that names no mesh.
// It was made with the chart, after etcd had lost its data or the chart had been taken away.
func Adopt(c *Claim) bool { return c != nil && c.Cluster == "" }
