package demo

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// ErrFailed is returned when a check did not hold.
var ErrFailed = errors.New("the demo failed")

// Show is what a demo tells of its run: chapters, and in them claims that are checked.
type Show struct {
	out    io.Writer
	start  time.Time
	checks []check
}

type check struct {
	name, detail string
	ok           bool
}

// NewShow begins a run that is told to out.
func NewShow(out io.Writer) *Show { return &Show{out: out, start: time.Now()} }

// Say prints a line.
func (s *Show) Say(format string, a ...any) { fmt.Fprintf(s.out, format+"\n", a...) }

// Chapter begins a chapter.
func (s *Show) Chapter(title string) { s.Say("\n%6.1fs  %s", time.Since(s.start).Seconds(), title) }

// note takes down whether a claim held.
func (s *Show) note(c check) {
	mark := "ok  "
	if !c.ok {
		mark = "FAIL"
	}
	s.Say("  %s  %s: %s", mark, c.name, c.detail)
	s.checks = append(s.checks, c)
}

// Verify checks a claim and notes it.
func (s *Show) Verify(name string, f func() (string, error)) {
	detail, err := f()
	c := check{name: name, detail: detail, ok: err == nil}
	if err != nil {
		c.detail = err.Error()
	}
	s.note(c)
}

// Stopped notes why the run went no further.
func (s *Show) Stopped(err error) { s.note(check{name: "the demo stopped", detail: err.Error()}) }

// Summary lists the claims, and is true when all of them held.
func (s *Show) Summary() bool {
	failed := 0
	s.Chapter("Summary")
	for _, c := range s.checks {
		mark := "ok  "
		if !c.ok {
			mark, failed = "FAIL", failed+1
		}
		s.Say("  %s  %s", mark, c.name)
	}
	s.Say("\n%d checks held, %d failed", len(s.checks)-failed, failed)
	return failed == 0
}
