package wire

import "sync/atomic"

const (
	// leastQueue may be held by every queue, however little memory is left.
	leastQueue = 64 << 10
	// shareOfFree is the part of the free memory that one queue may hold, so that many slow readers share what there is,
	// and those who come later still find some.
	shareOfFree = 8
)

// Budget counts the memory of all queues of a process.
type Budget struct {
	Limit atomic.Int64 // 0: none
	Used  atomic.Int64
}

// allow is how many bytes one queue may hold now.
func (b *Budget) allow() int {
	limit := b.Limit.Load()
	if limit == 0 {
		return 1 << 62
	}
	return max(int(limit-b.Used.Load())/shareOfFree, leastQueue)
}
