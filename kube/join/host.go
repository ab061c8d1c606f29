package join

import (
	"fmt"
	"time"
)

const (
	// Quiet is how long a claim stands before the mesh is made: members of a mesh that exists already say so meanwhile.
	Quiet = 3 * time.Second
	// Abandoned is how long a claim stands, unchanged as this host has seen it, until another server may take it over.
	Abandoned = time.Minute
)

// Host is the host that wishes to become a member.
type Host struct {
	Node   string // its Node object
	Server bool   // it is to be a server
	Meant  string // ID of the mesh that it had decided to make, from its disk; empty: none
}

// World is what the apiserver has.
type World struct {
	Claim        *Claim        // nil: there is no ConfigMap
	Stood        time.Duration // how long this process has seen the claim as it is
	Token        string        // in the Secret that this host may read
	TokenCluster string        // the mesh that the token is of
	Refused      string        // the token that has just been refused
}

// Claim is what the ConfigMap says.
type Claim struct {
	Node    string // that is to make the mesh; empty: nobody has claimed that yet
	Cluster string // the mesh's ID; empty: it is not made yet
}

// Act is what a host does next.
type Act int

// Acts.
const (
	Wait   Act = iota
	Join       // by the token
	Take       // write the claim for the own Node
	Settle     // write a new ID into the own claim, then make that mesh
	Create     // make the mesh that was meant
)

// Step is an act, and why it is that.
type Step struct {
	Act  Act
	Why  string
	Look time.Duration // when to look again at the latest, where time alone changes something; 0: no matter
}

// Next decides what a host does that is not a member yet.
func Next(h Host, w World) Step {
	made := ""
	if w.Claim != nil {
		made = w.Claim.Cluster
	}
	switch {
	case w.Token != "" && made != "" && w.TokenCluster != made:
		return Step{Why: fmt.Sprintf("the Secret's token is of mesh %s, and ConfigMap skein-cluster says %s",
			w.TokenCluster, made)}
	case w.Token != "" && w.Token == w.Refused:
		return Step{Why: "the token was refused, and there is no newer one yet"}
	case w.Token != "":
		return Step{Act: Join}
	case !h.Server:
		return Step{Why: "no server has made a token yet"}
	case w.Claim == nil:
		return Step{Why: "there is no ConfigMap skein-cluster, so no server may make a mesh (cluster.create of the chart)"}
	case made != "" && w.Claim.Node == h.Node && h.Meant == made:
		return Step{Act: Create}
	case made != "":
		return Step{Why: fmt.Sprintf("mesh %s was made by Node %s, and none of its servers has made a token; if it is gone"+
			" for good, delete ConfigMap skein-cluster and run helm upgrade", made, w.Claim.Node)}
	case w.Claim.Node == h.Node:
		if w.Stood < Quiet {
			return Step{Why: "a server of a mesh that exists already may still write to ConfigMap skein-cluster",
				Look: Quiet - w.Stood}
		}
		return Step{Act: Settle}
	case w.Claim.Node == "" || w.Stood >= Abandoned:
		return Step{Act: Take}
	}
	return Step{Why: fmt.Sprintf("Node %s is making the mesh", w.Claim.Node), Look: Abandoned - w.Stood}
}
