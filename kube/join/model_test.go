package join

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// model is servers and what they share: the ConfigMap, whose writes fail where it has changed since it was read, and
// the Secret. Time passes in steps.
type model struct {
	*rand.Rand
	t       *testing.T
	claim   *Claim
	version int
	token   string // the mesh that it is of; empty: none
	ids     int
	hosts   []*modelHost
	made    map[string]bool // meshes that were made with this ConfigMap
}

type modelHost struct {
	node, meant, member string // meant and member are on its disk
	away                bool
	seen                Claim
	version             int
	stood               time.Duration
	act                 Act // decided, not done yet
}

func (m *model) step(h *modelHost) {
	switch {
	case h.away:
	case h.member != "":
		if m.claim != nil && Adopt(m.claim) && m.IntN(2) == 0 {
			m.claim, m.version = &Claim{h.node, h.member}, m.version+1
		}
		if m.IntN(3) == 0 {
			m.token = h.member
		}
	case h.act == Wait:
		m.look(h)
	default:
		m.do(h)
	}
}

// look decides by what there is now; it is done in a later step, when that may have changed.
func (m *model) look(h *modelHost) {
	w := World{Claim: m.claim, Stood: h.stood, TokenCluster: m.token}
	if m.token != "" {
		w.Token = "token"
	}
	if m.claim != nil && (h.version != m.version) {
		h.seen, h.version, h.stood = *m.claim, m.version, 0
		w.Stood = 0
	}
	h.act = Next(Host{Node: h.node, Server: true, Meant: h.meant}, w).Act
}

func (m *model) do(h *modelHost) {
	act := h.act
	h.act = Wait
	unchanged := m.claim != nil && m.version == h.version
	switch act {
	case Join:
		if m.token != "" {
			h.member = m.token
		}
	case Take:
		if unchanged {
			m.claim, m.version = &Claim{Node: h.node}, m.version+1
		}
	case Settle:
		m.ids++
		h.meant = fmt.Sprint(m.ids)
		if m.IntN(8) == 0 {
			m.crash(h)
			return
		}
		if unchanged {
			m.claim, m.version = &Claim{h.node, h.meant}, m.version+1
			if m.IntN(4) > 0 { // else it crashes, or the answer is lost
				m.create(h, h.meant)
			}
		}
	case Create:
		m.create(h, h.seen.Cluster)
	}
}

func (m *model) create(h *modelHost, id string) {
	h.member, h.meant = id, ""
	again := m.made[id]
	m.made[id] = true
	if again || len(m.made) > 1 {
		m.t.Fatalf("a second mesh: %v, claim %+v", m.made, m.claim)
	}
}

func (m *model) crash(h *modelHost) { h.act, h.version, h.stood = Wait, -1, 0 }

// TestOneMesh: whatever servers do, in whatever order they start, crash, stay away or lose their disks, and also when
// etcd loses everything, one mesh at most is made; and without faults in the end, one is and all are in it.
func TestOneMesh(t *testing.T) {
	done := 0
	for seed := range uint64(3000) {
		m := &model{Rand: rand.New(rand.NewPCG(seed, 13)), t: t, claim: &Claim{}, made: map[string]bool{}}
		for _, name := range []string{"one", "two", "three"} {
			m.hosts = append(m.hosts, &modelHost{node: name, version: -1})
		}
		lost := false // somebody's disk, or etcd's data: then there may be no mesh in the end
		for range 400 {
			h := m.hosts[m.IntN(len(m.hosts))]
			switch m.IntN(40) {
			case 0:
				m.crash(h)
			case 1:
				h.away = !h.away
			case 2:
				if m.IntN(10) == 0 {
					m.crash(h)
					h.meant, h.member, lost = "", "", true
				}
			case 3:
				if m.IntN(20) == 0 {
					m.claim, m.token, lost = nil, "", true
				}
			default:
				m.step(h)
			}
			for _, h := range m.hosts {
				h.stood += time.Duration(m.IntN(2000)) * time.Millisecond
			}
		}
		if lost {
			continue
		}
		for range 2000 {
			h := m.hosts[m.IntN(len(m.hosts))]
			h.away = false
			m.step(h)
			h.stood += time.Second
		}
		for _, h := range m.hosts {
			if h.member == "" || h.member != m.hosts[0].member {
				t.Fatalf("seed %d: %s is in mesh %q; claim %+v", seed, h.node, h.member, m.claim)
			}
		}
		done++
	}
	if done < 500 {
		t.Fatalf("%d of 3000 runs were without a loss; the test says little", done)
	}
}
