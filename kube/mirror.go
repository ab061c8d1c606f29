package kube

import (
	"context"
	"fmt"
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// object is what skein uses of an object of Kubernetes'.
type object[T any] interface {
	same(T) bool // as far as skein uses it
}

// mirror holds the objects of one kind as a reflector brings them. It is a cache.ReflectorStore, safe for concurrent
// use.
type mirror[T object[T]] struct {
	slim  func(metav1.Object) T
	heard func() // called whenever the apiserver has brought something

	changed chan struct{} // receives a value after a change; changes in quick succession come as one

	mu     sync.Mutex
	all    map[string]T  // by name, or namespace/name
	synced bool          // a whole list has come
	news   chan struct{} // closed with the next change
}

func newMirror[T object[T]](slim func(metav1.Object) T, heard func()) *mirror[T] {
	return &mirror[T]{
		slim:    slim,
		heard:   heard,
		changed: make(chan struct{}, 1),
		all:     map[string]T{},
		news:    make(chan struct{}),
	}
}

// keyOf is an object's name, behind its namespace if it has one.
func keyOf(o metav1.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

// Add takes in an object.
func (m *mirror[T]) Add(o any) error { return m.Update(o) }

// Update takes in an object.
func (m *mirror[T]) Update(o any) error {
	p, err := objectOf(o)
	if err != nil {
		return err
	}
	next := m.slim(p)
	m.mu.Lock()
	defer m.mu.Unlock()
	old, known := m.all[keyOf(p)]
	news := !known || !old.same(next)
	if news {
		m.all[keyOf(p)] = next
	}
	m.notify(news)
	return nil
}

// Delete takes an object away.
func (m *mirror[T]) Delete(o any) error {
	p, err := objectOf(o)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, keyOf(p))
	m.notify(true)
	return nil
}

// Replace takes in a whole list.
func (m *mirror[T]) Replace(list []any, _ string) error {
	next := make(map[string]T, len(list))
	for _, o := range list {
		p, err := objectOf(o)
		if err != nil {
			return err
		}
		next[keyOf(p)] = m.slim(p)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	news := !m.synced || len(next) != len(m.all)
	for key, n := range next {
		if old, known := m.all[key]; known && old.same(n) {
			next[key] = old // what was done with it need not be done again
		} else {
			news = true
		}
	}
	m.all, m.synced = next, true
	m.notify(news)
	return nil
}

// Resync does nothing: whoever reads the objects reads all that is new.
func (m *mirror[T]) Resync() error { return nil }

// Bookmark is how a watch says that it is alive and has no news.
func (m *mirror[T]) Bookmark(string) error { m.heard(); return nil }

// notify passes on what has come. The caller has mu.
func (m *mirror[T]) notify(news bool) {
	m.heard()
	if news {
		close(m.news)
		m.news = make(chan struct{})
		signal(m.changed)
	}
}

func objectOf(o any) (metav1.Object, error) {
	p, ok := o.(metav1.Object)
	if !ok {
		return nil, fmt.Errorf("the apiserver sent a %T where an object was asked for", o)
	}
	return p, nil
}

// get is an object by its key.
func (m *mirror[T]) get(key string) (o T, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, known = m.all[key]
	return o, known
}

// count is how many there are, and whether a whole list has come.
func (m *mirror[T]) count() (n int, synced bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.all), m.synced
}

// snapshot is all of them, for the caller to keep; nil: no whole list has come.
func (m *mirror[T]) snapshot() map[string]T {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.synced {
		return nil
	}
	return maps.Clone(m.all)
}

// await waits until an object is there, or ctx is over.
func (m *mirror[T]) await(ctx context.Context, key string) (o T, known bool) {
	for {
		m.mu.Lock()
		o, known = m.all[key]
		news := m.news
		m.mu.Unlock()
		if known || ctx.Err() != nil {
			return o, known
		}
		select {
		case <-news:
		case <-ctx.Done():
		}
	}
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
