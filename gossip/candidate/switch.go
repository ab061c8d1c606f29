package candidate

import (
	"context"
	"sync"
)

// Switch is a Step that can be switched off and on while it is in use. Switched off it finds nothing. Its methods are
// safe for concurrent use.
type Switch struct {
	step Step

	mu   sync.Mutex // guards what follows
	on   bool
	wake func() // nil before the first Look
}

// NewSwitch puts a switch before a step that holds nothing of others.
func NewSwitch(s Step, on bool) *Switch { return &Switch{step: s, on: on} }

// Set switches the step on or off. It has it look anew if that is a change.
func (s *Switch) Set(on bool) {
	s.mu.Lock()
	changed := s.on != on
	s.on = on
	wake := s.wake
	s.mu.Unlock()
	if changed && wake != nil {
		wake()
	}
}

// Source is the step's.
func (s *Switch) Source() string { return s.step.Source() }

// Look has the step look if it is switched on.
func (s *Switch) Look(ctx context.Context, r Request) Found {
	s.mu.Lock()
	s.wake = r.Wake
	on := s.on
	s.mu.Unlock()
	if !on {
		return Found{}
	}
	return s.step.Look(ctx, r)
}
