package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// unpack reads a bundle.
func unpack(t *testing.T, b []byte) (out map[string]string, order []string) {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	out = map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, order
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Mode != 0o600 {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
		out[h.Name], order = string(body), append(order, h.Name)
	}
}

func give(text string, err error) func(context.Context) ([]byte, error) {
	return func(context.Context) ([]byte, error) { return []byte(text), err }
}

// TestWrite: each part is there or told of, secrets are gone from all and from what went wrong, and sizes are bounded.
func TestWrite(t *testing.T) {
	long := strings.Repeat("0123456789\n", 20)
	var out bytes.Buffer
	entries, err := Write(t.Context(), &out, "skein 1, bundle of home1", []Part{
		{Name: "good.txt", What: "one", Take: give("password=hunter2\n", nil)},
		{Name: "bad.txt", What: "another", Take: give("", errors.New("it failed with token=hunter2"))},
		{Name: "half.txt", What: "half of it", Take: give("half\n", errors.New("it broke off"))},
		{Name: "head.txt", What: "a long one", Most: 50, Take: give(long, nil)},
		{Name: "tail.txt", What: "a long one", Most: 50, Tail: true, Take: give(long+"last\n", nil)},
		{Name: "empty.txt", What: "nothing", Take: give("", nil)},
		{Name: "big.pprof", What: "too large", Most: 5, Raw: true, Take: give("123456", nil)},
		{Name: "raw.pprof", What: "as it is", Raw: true, Take: give("password=x", nil)},
		{Name: "skein.yaml", What: "configuration", Configuration: true, Take: give("a: 1 # hunter2\n", nil)},
	}, time.Unix(1, 0))
	if err != nil || len(entries) != 9 {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	files, order := unpack(t, out.Bytes())
	if order[0] != "skein-bundle/INDEX.txt" {
		t.Errorf("the index does not come first: %q", order)
	}
	for name, want := range map[string]string{
		"good.txt": "password=[redacted]\n", "half.txt": "half\n",
		"head.txt": "0123456789\n0123456789\n0123456789\n0123456789\n",
		"tail.txt": "0123456789\n0123456789\n0123456789\n0123456789\nlast\n", "raw.pprof": "password=x",
		"skein.yaml": "a: 1 # [redacted]\n",
	} {
		if files["skein-bundle/"+name] != want {
			t.Errorf("%s is %q, want %q", name, files["skein-bundle/"+name], want)
		}
	}
	if len(files) != 7 {
		t.Errorf("%d files: %q", len(files), order)
	}
	index := files["skein-bundle/INDEX.txt"]
	for _, want := range []string{"bundle of home1", "half of it (it broke off)",
		"another: it failed with token=[redacted]", "nothing: it is empty",
		"too large: larger than 5 bytes", "a long one (cut to its limit)", "1 redacted: one", "Never taken: private keys"} {
		if !strings.Contains(index, want) {
			t.Errorf("no %q in the index:\n%s", want, index)
		}
	}
	for name, text := range files {
		if strings.Contains(text, "hunter2") {
			t.Errorf("a secret is in %s: %s", name, text)
		}
	}
}

// TestWriteEnds: a caller that goes away gets no bundle that looks whole.
func TestWriteEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	_, err := Write(ctx, &out, "", []Part{{Name: "a", Take: func(context.Context) ([]byte,
		error) {
		cancel()
		return []byte("x"), nil
	}}}, time.Now())
	if !errors.Is(err, context.Canceled) || out.Len() > 0 {
		t.Errorf("%d bytes, %v", out.Len(), err)
	}
}
