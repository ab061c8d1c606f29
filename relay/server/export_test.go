package server

import "github.com/skeinmesh/skein/identity"

// What the tests of the external package see of the insides, and do to them.

const (
	MaxOpening        = maxOpening
	RefusalsPerSecond = refusalsPerSecond
	RefusalsBurst     = refusalsBurst
	WherePerSecond    = wherePerSecond
	WhereBurst        = whereBurst
)

// SessionOf is a node's session; nil: it has none.
func (s *Server) SessionOf(node identity.ID) *session { return s.session(node) }

// Say sends a client any frame.
func (x *session) Say(frame []byte) {
	x.Queue.PushControl(func(b []byte) []byte { return append(b, frame...) })
}

// IsLimitedBy tells whether a node grants this relay less than everything.
func (s *Server) IsLimitedBy(node identity.ID) bool {
	q := s.session(node).Queue
	q.Lock()
	defer q.Unlock()
	return q.Limited()
}

// Opening counts the connections of a node that have not said what they are for.
func (s *Server) Opening(node identity.ID) int {
	s.streams.mu.Lock()
	defer s.streams.mu.Unlock()
	return s.streams.fresh[node]
}
