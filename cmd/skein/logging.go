package main

import (
	"context"
	"io"
	"log/slog"
	"sync/atomic"

	"github.com/skeinmesh/skein/agent/config"
)

// made is a handler with attributes and groups on it, and what it was made of.
type made struct{ of, h *slog.Handler }

// logSwitch is a slog.Handler whose level and format can change while loggers made of it are in use.
type logSwitch struct {
	out     io.Writer
	handler *atomic.Pointer[slog.Handler]     // shared by all that were made of one
	with    []func(slog.Handler) slog.Handler // attributes and groups, in their order
	made    *atomic.Pointer[made]             // handler with these on it, as of its last use
}

func newLogSwitch(out io.Writer, c config.Log) *logSwitch {
	s := &logSwitch{out: out, handler: new(atomic.Pointer[slog.Handler]), made: new(atomic.Pointer[made])}
	s.set(c)
	return s
}

// set changes level and format.
func (s *logSwitch) set(c config.Log) {
	h := handler(s.out, c)
	s.handler.Store(&h)
}

func handler(out io.Writer, c config.Log) slog.Handler {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.Level)); err != nil {
		level = slog.LevelInfo
	}
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.NewJSONHandler(out, o)
	}
	return slog.NewTextHandler(out, o)
}

func (s *logSwitch) now() slog.Handler {
	base := s.handler.Load()
	if m := s.made.Load(); m != nil && m.of == base {
		return *m.h
	}
	h := *base
	for _, f := range s.with {
		h = f(h)
	}
	s.made.Store(&made{base, &h})
	return h
}

// Enabled reports whether a record of a level is written now.
func (s *logSwitch) Enabled(ctx context.Context, l slog.Level) bool {
	return (*s.handler.Load()).Enabled(ctx, l)
}

// Handle writes a record.
func (s *logSwitch) Handle(ctx context.Context, r slog.Record) error { return s.now().Handle(ctx, r) }

// WithAttrs returns a handler that adds attributes.
func (s *logSwitch) WithAttrs(a []slog.Attr) slog.Handler {
	return s.plus(func(h slog.Handler) slog.Handler { return h.WithAttrs(a) })
}

// WithGroup returns a handler that puts later attributes into a group.
func (s *logSwitch) WithGroup(name string) slog.Handler {
	return s.plus(func(h slog.Handler) slog.Handler { return h.WithGroup(name) })
}

func (s *logSwitch) plus(f func(slog.Handler) slog.Handler) slog.Handler {
	n := *s
	n.with = append(n.with[:len(n.with):len(n.with)], f)
	n.made = new(atomic.Pointer[made])
	return &n
}
