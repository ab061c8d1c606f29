package lab

import (
	"fmt"
	"os/exec"
	"strings"
	"sync"
)

// crowdKinds are the sites of a crowd, each behind a NAT of another kind.
var crowdKinds = []struct{ site, nat string }{
	{"dc", "none"}, {"flat", "restricted-cone"}, {"home", "port-restricted-cone"}, {"cloud", "symmetric"},
	{"far", "double"},
}

// crowdServers is how many of the public nodes of a crowd are servers and relays.
const crowdServers = 3

// Crowd is the file of a lab of so many agents, spread over sites behind five kinds of NAT; the first three public ones
// are servers and relays. They have a pool that pods get addresses from.
func Crowd(name string, agents int) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "name: %s\nsites:\n", name)
	for _, k := range crowdKinds {
		fmt.Fprintf(&b, "  %s: {nat: %s}\n", k.site, k.nat)
	}
	b.WriteString("nodes:\n")
	for i := range agents {
		k, number := crowdKinds[i%len(crowdKinds)], i/len(crowdKinds)+1
		role := ""
		if i%len(crowdKinds) == 0 && number <= crowdServers {
			role = ", server: true, relay: true"
		}
		fmt.Fprintf(&b, "  %s%d: {site: %s%s}\n", k.site, number, k.site, role)
	}
	b.WriteString("pools:\n  default: {subnets: [{ipv4: 10.64.0.0/16, ipv6: 'fd01::/112'}]}\n")
	return []byte(b.String())
}

// burning takes a core as long as the process that started it lives: nobody has to end what a killed test left.
const burning = `while kill -0 $PPID 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done`

// Burn starts processes that take a core of this host each, until end is called. It may be called more than once.
func Burn(processes int) (end func(), err error) {
	var all []*exec.Cmd
	var once sync.Once
	end = func() {
		once.Do(func() {
			for _, c := range all {
				_ = c.Process.Kill()
				_ = c.Wait() // killed
			}
		})
	}
	for range processes {
		c := exec.Command("sh", "-c", burning)
		if err := c.Start(); err != nil {
			end()
			return nil, fmt.Errorf("start a process that burns a core: %w", err)
		}
		all = append(all, c)
	}
	return end, nil
}
