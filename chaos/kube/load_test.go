package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

// load asks something over HTTP at a steady rate, each time by a new connection, and counts what is answered.
type load struct {
	name  string
	every time.Duration
	ask   func(context.Context) error

	stop context.CancelFunc
	all  sync.WaitGroup

	mu       sync.Mutex
	asked    int
	answered int
	began    time.Time
	newest   time.Time     // answer
	longest  time.Duration // without one
	since    time.Time     // when that began
	failed   error         // the newest failure
}

// requestTimeout is how long one request may take.
const requestTimeout = 5 * time.Second

// startLoad begins it; it ends with the test, or with end.
func startLoad(t *testing.T, name string, every time.Duration, ask func(context.Context) error) *load {
	ctx, cancel := context.WithCancel(t.Context())
	now := time.Now()
	l := &load{name: name, every: every, ask: ask, stop: cancel, began: now, newest: now}
	l.all.Go(func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			l.all.Go(func() { l.one(ctx) })
		}
	})
	t.Cleanup(l.end)
	return l
}

func (l *load) one(ctx context.Context) {
	l.mu.Lock()
	l.asked++
	l.mu.Unlock()
	inner, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	err := l.ask(inner)
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case ctx.Err() != nil: // it was not given its time
		l.asked--
	case err != nil:
		l.failed = err
	default:
		l.answered++
		l.pause(now)
		l.newest = now
	}
}

// pause takes in that nothing was answered until now. The caller has mu.
func (l *load) pause(now time.Time) {
	if d := now.Sub(l.newest); d > l.longest {
		l.longest, l.since = d, l.newest
	}
}

// answers waits until so many more have been answered.
func (l *load) answers(ctx context.Context, more int, within time.Duration) error {
	count := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.answered
	}
	want := count() + more
	_, err := poll(ctx, within, tryEvery, func() error {
		if n := count(); n < want {
			return fmt.Errorf("%s: %d requests were answered, want %d", l.name, n, want)
		}
		return nil
	})
	return err
}

func (l *load) end() {
	l.stop()
	l.all.Wait()
}

// report ends it, and returns how many were asked and answered, and the longest time without an answer.
func (l *load) report() (asked, answered int, longest time.Duration, text string) {
	now := time.Now()
	l.end()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pause(now)
	text = fmt.Sprintf("%s: %d of %d requests answered, longest pause %s, %s after the begin", l.name, l.answered, l.asked,
		l.longest.Round(time.Millisecond), l.since.Sub(l.began).Round(100*time.Millisecond))
	if l.failed != nil {
		text += fmt.Sprintf("; the last failure: %v", l.failed)
	}
	return l.asked, l.answered, l.longest, text
}

// fetch asks a server from a network namespace and returns the answer.
func fetch(ctx context.Context, netns string, at netip.AddrPort, path string) (string, error) {
	return call(ctx, netns, http.MethodGet, "http://"+at.String()+path, "")
}

// call is one request from a network namespace, by a connection of its own.
func call(ctx context.Context, netns, method, url, body string) (string, error) {
	c := http.Client{Transport: &http.Transport{DialContext: dialer(netns), DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, b)
	}
	return string(b), err
}
