package consensus

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// raftLog carries the Raft library's log to slog. The library logs every failed heartbeat as an
// error and every election as a warning; for an operator those are one and two steps less, and the
// same line about the same peer is told once in repeatEvery.
type raftLog struct {
	to   *slog.Logger
	args []any
	seen *seenLines
}

const repeatEvery = 10 * time.Second

type seenLines struct {
	sync.Mutex
	at map[string]time.Time
}

// again reports whether the line was let through a short while ago.
func (s *seenLines) again(line string) bool {
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	if at, ok := s.at[line]; ok && now.Sub(at) < repeatEvery {
		return true
	}
	if len(s.at) > 256 {
		clear(s.at)
	}
	s.at[line] = now
	return false
}

func newRaftLog(to *slog.Logger) hclog.Logger {
	return &raftLog{to: to.With("component", "raft"), seen: &seenLines{at: make(map[string]time.Time)}}
}

func slogLevel(l hclog.Level) slog.Level {
	switch l {
	case hclog.Error:
		return slog.LevelWarn
	case hclog.Warn:
		return slog.LevelInfo
	case hclog.Info:
		return slog.LevelDebug
	}
	return slog.LevelDebug - 4
}

func (l *raftLog) Log(level hclog.Level, msg string, args ...any) {
	to := slogLevel(level)
	if !l.to.Enabled(context.Background(), to) {
		return
	}
	if level >= hclog.Warn && l.seen.again(msg+subject(args)) {
		return
	}
	for i, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			args[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	l.to.Log(context.Background(), to, msg, args...)
}

// subject is whom a line is about.
func subject(args []any) string {
	for i := 0; i+1 < len(args); i += 2 {
		switch args[i] {
		case "peer", "from", "remote-address", "server-id":
			return fmt.Sprint(" ", args[i+1])
		}
	}
	return ""
}

func (l *raftLog) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }
func (l *raftLog) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }
func (l *raftLog) Info(msg string, args ...any)  { l.Log(hclog.Info, msg, args...) }
func (l *raftLog) Warn(msg string, args ...any)  { l.Log(hclog.Warn, msg, args...) }
func (l *raftLog) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

func (l *raftLog) enabled(level hclog.Level) bool {
	return l.to.Enabled(context.Background(), slogLevel(level))
}
func (l *raftLog) IsTrace() bool                  { return l.enabled(hclog.Trace) }
func (l *raftLog) IsDebug() bool                  { return l.enabled(hclog.Debug) }
func (l *raftLog) IsInfo() bool                   { return l.enabled(hclog.Info) }
func (l *raftLog) IsWarn() bool                   { return l.enabled(hclog.Warn) }
func (l *raftLog) IsError() bool                  { return l.enabled(hclog.Error) }
func (l *raftLog) SetLevel(hclog.Level)           {}
func (l *raftLog) GetLevel() hclog.Level          { return hclog.Debug }
func (l *raftLog) ImpliedArgs() []any             { return l.args }
func (l *raftLog) Name() string                   { return "raft" }
func (l *raftLog) Named(string) hclog.Logger      { return l }
func (l *raftLog) ResetNamed(string) hclog.Logger { return l }

func (l *raftLog) With(args ...any) hclog.Logger {
	return &raftLog{to: l.to.With(args...), args: append(append([]any(nil), l.args...), args...), seen: l.seen}
}

func (l *raftLog) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return slog.NewLogLogger(l.to.Handler(), slog.LevelDebug)
}

func (l *raftLog) StandardWriter(o *hclog.StandardLoggerOptions) io.Writer {
	return l.StandardLogger(o).Writer()
}
