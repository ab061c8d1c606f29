package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

const (
	// MostBytes is the size of a part that names none.
	MostBytes = 4 << 20
	// partWait is how long a part may take.
	partWait = 20 * time.Second
	// IndexName is the file that says what is in a bundle.
	IndexName = "INDEX.txt"
)

// ErrAbsent is wrapped by a Take that has nothing to give: there is no such thing on this host.
var ErrAbsent = errors.New("not there")

// Part is one file of a bundle.
type Part struct {
	Name string // with folders, by /
	What string // a clause for the index
	Most int    // bytes; 0: MostBytes
	Tail bool   // of what is too large, the end is kept
	// Raw parts are not scrubbed: profiles, which hold names of functions and no memory. Configuration files are
	// scrubbed by ScrubFile.
	Raw, Configuration bool
	// Take gives the part. What it gives beside an error is kept.
	Take func(ctx context.Context) ([]byte, error)
}

// Entry tells of one part.
type Entry struct {
	Name, What string
	Bytes      int // 0: left out
	Redacted   int // places
	Remark     string
}

// Write takes all parts, one after another, and writes them to w. The error is w's, or ctx's; what a part lacks is in
// the entries.
func Write(ctx context.Context, w io.Writer, head string, parts []Part, at time.Time) ([]Entry, error) {
	var entries []Entry
	var bodies [][]byte
	for _, p := range parts {
		e, body := collect(ctx, p)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("the bundle is not complete: %w", err)
		}
		entries, bodies = append(entries, e), append(bodies, body)
	}
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	put := func(name string, b []byte) error {
		err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "skein-bundle/" + name, Mode: 0o600,
			Size: int64(len(b)), ModTime: at})
		if err == nil {
			_, err = t.Write(b)
		}
		return err
	}
	if err := put(IndexName, index(head, entries)); err != nil {
		return nil, err
	}
	for i, e := range entries {
		if e.Bytes > 0 {
			if err := put(e.Name, bodies[i]); err != nil {
				return nil, err
			}
		}
	}
	return entries, errors.Join(t.Close(), z.Close())
}

func collect(ctx context.Context, p Part) (Entry, []byte) {
	ctx, cancel := context.WithTimeout(ctx, partWait)
	defer cancel()
	e := Entry{Name: p.Name, What: p.What}
	body, err := p.Take(ctx)
	if err != nil {
		e.Remark, _ = Scrub(err.Error())
	}
	most := p.Most
	if most == 0 {
		most = MostBytes
	}
	if len(body) > 4*most && !p.Raw { // what is far too large is not searched in full
		body = cut(body, 4*most, p.Tail)
		e.Remark = remark(e.Remark, "cut to its limit")
	}
	switch {
	case p.Raw && len(body) > most:
		return Entry{Name: p.Name, What: p.What, Remark: fmt.Sprintf("larger than %d bytes", most)}, nil
	case p.Raw:
	case p.Configuration:
		var text string
		text, e.Redacted = ScrubFile(string(body))
		body = []byte(text)
	default:
		var text string
		text, e.Redacted = Scrub(string(body))
		body = []byte(text)
	}
	if len(body) > most {
		body = cut(body, most, p.Tail)
		e.Remark = remark(e.Remark, "cut to its limit")
	}
	e.Bytes = len(body)
	return e, body
}

func remark(old, more string) string {
	if old == "" || old == more {
		return more
	}
	return old + "; " + more
}

// cut keeps the beginning or the end, of whole lines where there are some.
func cut(b []byte, most int, tail bool) []byte {
	if len(b) <= most {
		return b
	}
	if tail {
		b = b[len(b)-most:]
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			b = b[i+1:]
		}
		return b
	}
	b = b[:most]
	if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
		b = b[:i+1]
	}
	return b
}

// notTaken is what no bundle has, whatever is found.
const notTaken = `Never taken: private keys and all other contents of the state directory but the journal, the contents of the
kubeconfig and of token files, memory, packets, environment variables but those of skein and the Go runtime.

In all texts these are replaced by [redacted]: private keys, tokens, values of names such as password, token or secret,
users and passwords in URLs, comments of the configuration. Values as long as a key, public keys and hashes among them,
are replaced by the beginning of their SHA-256, so that equal ones can be told to be equal. Names and addresses of hosts
stay: look through the bundle before you give it to others.
`

func index(head string, entries []Entry) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\nWhat is in it:\n", head)
	for _, e := range entries {
		if e.Bytes == 0 {
			continue
		}
		fmt.Fprintf(&b, "  %-28s %8d bytes, %4d redacted: %s", e.Name, e.Bytes, e.Redacted, e.What)
		if e.Remark != "" {
			fmt.Fprintf(&b, " (%s)", e.Remark)
		}
		b.WriteByte('\n')
	}
	b.WriteString("\nWhat was left out:\n")
	for _, e := range entries {
		if e.Bytes == 0 {
			why := e.Remark
			if why == "" {
				why = "it is empty"
			}
			fmt.Fprintf(&b, "  %-28s %s: %s\n", e.Name, e.What, why)
		}
	}
	b.WriteString("\n" + notTaken)
	return []byte(b.String())
}
