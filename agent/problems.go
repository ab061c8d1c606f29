package agent

import (
	"cmp"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Severities of a problem. An error makes the agent not ready.
const (
	warning = "warning"
	failure = "error"
)

// problems is what a user should know now. A problem stays until it is cleared.
type problems struct {
	mu  sync.Mutex
	all map[string]*skeinv1.Problem
}

func newProblems() *problems { return &problems{all: map[string]*skeinv1.Problem{}} }

// set notes a problem of a subject, or clears it when message is empty. It tells whether that was news.
func (p *problems) set(subject, severity, message, advice string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.all[subject]
	if message == "" {
		delete(p.all, subject)
		return old != nil
	}
	if old != nil && old.GetMessage() == message {
		return false
	}
	p.all[subject] = &skeinv1.Problem{Subject: subject, Severity: severity, Message: message, Advice: advice,
		Since: time.Now().UnixNano()}
	return true
}

func (p *problems) list() []*skeinv1.Problem {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]*skeinv1.Problem, 0, len(p.all))
	for _, one := range p.all {
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b *skeinv1.Problem) int { return cmp.Compare(a.GetSubject(), b.GetSubject()) })
	return out
}

func (p *problems) failing() *skeinv1.Problem {
	for _, one := range p.list() {
		if one.GetSeverity() == failure {
			return one
		}
	}
	return nil
}
