package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

// compactAfter is how many records the file may have beyond twice the number needed.
const compactAfter = 4096

var (
	crcTable   = crc32.MakeTable(crc32.Castagnoli)
	errDamaged = errors.New("damaged")
)

// file is an append-only list of records: one per line, preceded by its CRC-32C in hex. One write appends a record
// and does not wait for the disk: the kernel keeps the data when the agent is killed, and after a power cut there are
// no pods.
type file struct {
	path    string
	f       *os.File
	size    int64 // of the complete lines
	records int
	buf     bytes.Buffer
	enc     *json.Encoder
}

func newFile(path string) *file {
	f := &file{path: path}
	f.enc = json.NewEncoder(&f.buf)
	f.enc.SetEscapeHTML(false)
	return f
}

// readRecords reads a file; its error wraps errDamaged when a line is damaged. An incomplete last line was never
// acknowledged and is ignored.
func readRecords(path string) ([]record, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []record
	for n := 1; len(b) > 0; n++ {
		line, rest, whole := bytes.Cut(b, []byte("\n"))
		if !whole {
			break
		}
		b = rest
		r, err := parseRecord(line)
		if err != nil {
			return nil, fmt.Errorf("%w in line %d: %w", errDamaged, n, err)
		}
		if (n == 1) != (r.Op == opBoot) {
			return nil, fmt.Errorf("%w in line %d: the boot ID stands in the first line alone", errDamaged, n)
		}
		out = append(out, r)
	}
	return out, nil
}

func parseRecord(line []byte) (r record, err error) {
	if len(line) < 10 || line[8] != ' ' {
		return r, errors.New("no checksum")
	}
	sum, err := strconv.ParseUint(string(line[:8]), 16, 32)
	if err != nil {
		return r, errors.New("no checksum")
	}
	if crc32.Checksum(line[9:], crcTable) != uint32(sum) {
		return r, errors.New("wrong checksum")
	}
	return r, json.Unmarshal(line[9:], &r)
}

func (f *file) encode(r record) error {
	at := f.buf.Len()
	f.buf.WriteString("00000000 ")
	if err := f.enc.Encode(r); err != nil {
		f.buf.Truncate(at)
		return err
	}
	line := f.buf.Bytes()[at:]
	const hexDigits = "0123456789abcdef"
	sum := crc32.Checksum(line[9:len(line)-1], crcTable)
	for i := range 8 {
		line[i] = hexDigits[sum>>(28-4*i)&15]
	}
	return nil
}

// append writes records in one write. If that fails, the file contains none of them.
func (f *file) append(records ...record) error {
	if f.f == nil {
		return fmt.Errorf("%s: %w", f.path, fs.ErrClosed)
	}
	f.buf.Reset()
	for _, r := range records {
		if err := f.encode(r); err != nil {
			return err
		}
	}
	n, err := f.f.WriteAt(f.buf.Bytes(), f.size)
	if err != nil {
		return errors.Join(err, f.f.Truncate(f.size))
	}
	f.size += int64(n)
	f.records += len(records)
	return nil
}

// rewrite replaces the file's content with these records.
func (f *file) rewrite(records []record) error {
	f.buf.Reset()
	for _, r := range records {
		if err := f.encode(r); err != nil {
			return err
		}
	}
	next, err := os.OpenFile(f.path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err = next.Write(f.buf.Bytes()); err == nil {
		err = os.Rename(next.Name(), f.path)
	}
	if err != nil {
		return errors.Join(err, next.Close(), os.Remove(next.Name()))
	}
	if f.f != nil {
		err = f.f.Close()
	}
	f.f, f.size, f.records = next, int64(f.buf.Len()), len(records)
	if f.buf.Cap() > 1<<20 {
		f.buf = bytes.Buffer{}
		f.enc = json.NewEncoder(&f.buf)
		f.enc.SetEscapeHTML(false)
	}
	return err
}

// putAside renames a damaged file, so that it can be examined.
func putAside(path string) (string, error) {
	aside := path + ".damaged"
	if err := os.Rename(path, aside); err != nil {
		return "", err
	}
	return filepath.Base(aside), nil
}

func (f *file) close() error {
	if f.f == nil {
		return nil
	}
	err := f.f.Close()
	f.f = nil
	return err
}

// snapshot is the shortest list of records that produces the same core.
func (c *core) snapshot(bootID string, now moment) []record {
	out := []record{now.stamp(record{Op: opBoot, Text: bootID})}
	for pool, at := range c.uses {
		out = append(out, now.ago(at).stamp(record{Op: opUse, Pool: pool}))
	}
	for _, p := range c.past {
		out = append(out, pastRecord(p, now))
	}
	for _, h := range c.leases {
		r := giveRecord(h.Lease)
		r.Number, r.Offset, r.InBlock, r.Since = h.block.Number, h.off, h.inBlock, h.Since.UnixNano()
		out = append(out, now.ago(h.born).stamp(r))
	}
	for k, off := range c.cursors {
		if c.blocks[k] != nil || c.view.Index == 0 {
			out = append(out, record{Op: opCursor, Pool: k.Pool, Number: k.Number, Offset: off})
		}
	}
	return out
}

// restore reads the file into the core, and rewrites the file. The notes are for the user.
func restore(c *core, f *file, bootID string, now moment) (notes []string, err error) {
	records, err := readRecords(f.path)
	switch {
	case errors.Is(err, errDamaged):
		aside, moved := putAside(f.path)
		if moved != nil {
			return nil, fmt.Errorf("%s is damaged and cannot be put aside: %w", f.path, errors.Join(err, moved))
		}
		notes = append(notes, fmt.Sprintf("%s was unreadable (%v) and is now called %s: what pods have is read from the "+
			"kernel, but how long other addresses must rest is forgotten", f.path, err, aside))
	case err != nil:
		return nil, fmt.Errorf("read the addresses of this host's pods: %w", err)
	}
	sameBoot := len(records) > 0 && records[0].Text == bootID
	for _, r := range records {
		c.apply(r, now.since(r, sameBoot))
	}
	if len(records) > 0 && !sameBoot && len(c.leases) > 0 {
		notes = append(notes,
			fmt.Sprintf("the kernel was started anew: the %d pods that had addresses are gone", len(c.leases)))
		for _, h := range c.leases {
			c.apply(now.stamp(c.release(h, "the kernel was started anew")), now.at)
		}
	}
	if err := f.rewrite(c.snapshot(bootID, now)); err != nil {
		return nil, fmt.Errorf("write the addresses of this host's pods: %w", err)
	}
	return notes, nil
}
