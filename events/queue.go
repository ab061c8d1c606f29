package events

import "slices"

const chunkSize = 64

// queued is a request ID with the bytes that its answer takes in the state.
type queued struct {
	id    string
	bytes int
}

// queue is a persistent first-in-first-out list of request IDs, in chunks so that a clone copies
// little. A copied struct must be changed by another owner than before.
type queue struct {
	chunks [][]queued // all but the last are full
	head   int        // taken from the first chunk
	n      int
	owner  *owner // who may append in place
}

func (q *queue) push(o *owner, v queued) {
	if q.owner != o {
		q.chunks = slices.Clone(q.chunks)
		if last := len(q.chunks) - 1; last >= 0 {
			q.chunks[last] = append(make([]queued, 0, chunkSize), q.chunks[last]...)
		}
		q.owner = o
	}
	last := len(q.chunks) - 1
	if last < 0 || len(q.chunks[last]) == chunkSize {
		q.chunks = append(q.chunks, make([]queued, 0, chunkSize))
		last++
	}
	q.chunks[last] = append(q.chunks[last], v)
	q.n++
}

// pop takes the oldest; the queue must not be empty. It changes no shared memory.
func (q *queue) pop() queued {
	v := q.chunks[0][q.head]
	q.n--
	if q.head++; q.head == chunkSize {
		q.chunks, q.head = q.chunks[1:], 0
	}
	return v
}

func (q *queue) all(yield func(string) bool) {
	skip := q.head
	for _, c := range q.chunks {
		for _, v := range c[skip:] {
			if !yield(v.id) {
				return
			}
		}
		skip = 0
	}
}
