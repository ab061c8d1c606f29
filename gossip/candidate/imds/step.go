package imds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

const (
	lookEvery  = 5 * time.Minute // an elastic IP can be given and taken at any time
	retryEvery = 30 * time.Second
)

// Step publishes what the metadata service knows.
type Step struct {
	port   uint16
	log    *slog.Logger
	client *client

	last []netip.Addr // of the last answer; owned by Look
}

// New makes a Step; nothing is asked before Look.
func New(port uint16, mark uint32, log *slog.Logger) *Step {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Step{port: port, log: log, client: newClient(mark)}
}

// Source names the step.
func (*Step) Source() string { return "imds" }

// Look asks for the addresses. What was known stays while the service does not answer.
func (s *Step) Look(ctx context.Context, r candidate.Request) candidate.Found {
	if r.Fresh {
		s.client.token = "" // another network, perhaps another instance that this one is a copy of
	}
	addrs, err := s.client.addresses(ctx)
	f := candidate.Found{Again: lookEvery}
	note := candidate.Note{Source: s.Source(), OK: err == nil}
	switch {
	case errors.Is(err, errAway):
		note.Text = "no metadata service answers on this host; in a container it needs a hop limit of 2"
		f.Again = retryEvery
	case err != nil:
		note.Text = err.Error()
		s.last = nil
	case len(addrs) == 0:
		note.Text = "this instance has no public address"
		s.last = nil
	default:
		note.Text = fmt.Sprintf("this instance is known as %v", addrs)
		s.last = addrs
	}
	f.Notes = []candidate.Note{note}
	f.Elastic = slices.Clone(s.last)
	for _, a := range s.last {
		f.Candidates = append(f.Candidates, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX,
			netip.AddrPortFrom(a, s.port), candidate.PriorityReflexive, s.Source()))
	}
	return f
}

// Likely reports whether the firmware says that this host is one of Amazon's. dir is /sys/class/dmi/id.
func Likely(dir string) bool {
	for _, name := range []string{"sys_vendor", "board_vendor", "bios_vendor", "bios_version"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil && strings.Contains(strings.ToLower(string(b)), "amazon") {
			return true
		}
	}
	return false
}
