package lab

import "testing"

// A crowd is a lab file like any other, whatever its size.
func TestCrowd(t *testing.T) {
	for _, agents := range []int{1, 5, 12, 40, 63} {
		spec, err := Parse("crowd.yaml", Crowd("many", agents))
		if err != nil {
			t.Fatalf("%d agents: %v", agents, err)
		}
		servers, sites := 0, map[string]bool{}
		for _, n := range spec.Nodes {
			sites[n.Site] = true
			if n.Server {
				servers++
			}
		}
		if want := min(crowdServers, (agents+len(crowdKinds)-1)/len(crowdKinds)); len(spec.Nodes) != agents ||
			servers != want {
			t.Errorf("%d agents: %d nodes, %d servers, want %d", agents, len(spec.Nodes), servers, want)
		}
		if len(sites) != min(agents, len(crowdKinds)) {
			t.Errorf("%d agents: sites %v", agents, sites)
		}
	}
}

// What burns a core ends when it is told to, also twice.
func TestBurn(t *testing.T) {
	end, err := Burn(2)
	if err != nil {
		t.Fatal(err)
	}
	end()
	end()
}
