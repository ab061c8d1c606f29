package consensus

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// bbolt checks the pages of a file when it opens it for writing, in a goroutine of its own that goes on while Open
// gives up: on a damaged file that can end the process. boltPages finds beforehand what that check would. The layout is
// that of bbolt's file format, version 2, in the machine's byte order, which is little-endian wherever skein runs.
type boltPages struct {
	file io.ReaderAt
	size int64           // of a page, in bytes
	end  uint64          // pages from here on were never used
	seen map[uint64]bool // pages that something leads to
}

const (
	pageHeader  = 16 // id, flags, count, overflow: 8, 2, 2 and 4 bytes
	pageElement = 16 // of a branch: position, key size, page; of a leaf: flags, position, key size, value size
	pageBranch  = 0x01
	pageLeaf    = 0x02
	leafBucket  = 0x01 // flag of an element: its value is a bucket, which begins with the root page
)

// check walks a bucket's pages from its root, and those of the buckets in it. Damage is an error, or a panic by an
// index out of range: it runs in guard.
func (b *boltPages) check(root uint64) error {
	_, err := b.walk(root, nil, nil)
	return err
}

// walk checks the pages below one whose keys are min at least and below max, each nil for no bound. It returns the last
// key.
func (b *boltPages) walk(id uint64, low, high []byte) ([]byte, error) {
	page, err := b.read(id)
	if err != nil {
		return nil, err
	}
	flags, count := binary.LittleEndian.Uint16(page[8:]), int(binary.LittleEndian.Uint16(page[10:]))
	if flags != pageBranch && flags != pageLeaf {
		return nil, fmt.Errorf("page %d is neither branch nor leaf (flags %#x)", id, flags)
	}
	last := low
	for i := range count {
		at := pageHeader + i*pageElement
		key := elementKey(page, at, flags)
		if order := bytes.Compare(last, key); last != nil && (order > 0 || order == 0 && i > 0) || high != nil &&
			bytes.Compare(key, high) >= 0 {
			return nil, fmt.Errorf("page %d: key %d is out of order", id, i)
		}
		if flags == pageLeaf {
			last = key
			if err := b.inner(page, at); err != nil {
				return nil, err
			}
			continue
		}
		next := high
		if i < count-1 {
			next = elementKey(page, at+pageElement, flags)
		}
		if last, err = b.walk(binary.LittleEndian.Uint64(page[at+8:]), key, next); err != nil {
			return nil, err
		}
	}
	return last, nil
}

// inner checks the bucket that a leaf's element holds, if it is one with pages of its own.
func (b *boltPages) inner(page []byte, at int) error {
	if binary.LittleEndian.Uint32(page[at:])&leafBucket == 0 {
		return nil
	}
	value := at + int(binary.LittleEndian.Uint32(page[at+4:])) + int(binary.LittleEndian.Uint32(page[at+8:]))
	if root := binary.LittleEndian.Uint64(page[value:]); root != 0 {
		return b.check(root)
	}
	return nil
}

func elementKey(page []byte, at int, flags uint16) []byte {
	position, size := binary.LittleEndian.Uint32(page[at:]), binary.LittleEndian.Uint32(page[at+4:])
	if flags == pageLeaf {
		position, size = size, binary.LittleEndian.Uint32(page[at+8:])
	}
	start := at + int(position)
	return page[start : start+int(size)]
}

// read is a page with its overflow. Each is led to once.
func (b *boltPages) read(id uint64) ([]byte, error) {
	var head [pageHeader]byte
	if id < 2 || id >= b.end {
		return nil, fmt.Errorf("page %d is out of range: there are %d", id, b.end)
	}
	if _, err := b.file.ReadAt(head[:], int64(id)*b.size); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	more := uint64(binary.LittleEndian.Uint32(head[12:]))
	if own := binary.LittleEndian.Uint64(head[:]); own != id || more >= b.end-id {
		return nil, fmt.Errorf("page %d calls itself page %d with %d more: the file has %d pages", id, own, more, b.end)
	}
	for i := id; i <= id+more; i++ {
		if b.seen[i] {
			return nil, fmt.Errorf("page %d is referenced twice", i)
		}
		b.seen[i] = true
	}
	page := make([]byte, int64(more+1)*b.size)
	if _, err := b.file.ReadAt(page, int64(id)*b.size); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	return page, nil
}
