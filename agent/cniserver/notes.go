package cniserver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/cni"
)

// deletedAway is the reason of a Release that a note led to.
const deletedAway = "CNI DEL while the agent was away"

// ReadNotes acts on what the plugin noted while no agent answered: attachments that are gone give their addresses back.
// Notes that could not be acted on stay.
func (s *Server) ReadNotes(ctx context.Context) error {
	if s.cfg.NoteDir == "" {
		return nil
	}
	notes, err := cni.ReadNotes(s.cfg.NoteDir)
	errs := []error{err}
	for _, n := range notes {
		err := s.keys.with(ctx, n.Key, func() error {
			if !cni.HasNote(s.cfg.NoteDir, n.Key) {
				return nil // another request has acted on it, and an ADD may have come since
			}
			return s.remove(ctx, n.Key, "", deletedAway)
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("remove %s of container %s, as a note of the plugin asks: %w", n.Interface,
				n.ContainerID, err))
			continue
		}
		s.cfg.Log.Info("an attachment was removed while the agent was away", "container", n.ContainerID,
			"interface", n.Interface)
	}
	return errors.Join(errs...)
}

// watchNotes looks for notes from time to time.
func (s *Server) watchNotes(ctx context.Context) {
	t := time.NewTicker(notesEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := s.ReadNotes(ctx); err != nil {
			s.cfg.Log.Warn("cannot act on some notes of the CNI plugin", "error", err)
		}
	}
}
