package kerneltest

import (
	"archive/tar"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

const (
	keptLine  = 3 << 10  // bytes of the archive on one line of the console
	keptBytes = 64 << 20 // of an archive, at most: the serial line is slow
)

// SendKept writes a directory to the console, as an archive that listen puts together again.
func SendKept(console io.Writer, dir string) error {
	r, w := io.Pipe()
	go func() {
		z := gzip.NewWriter(w)
		t := tar.NewWriter(z)
		err := t.AddFS(os.DirFS(dir))
		w.CloseWithError(errors.Join(err, t.Close(), z.Close()))
	}()
	piece := make([]byte, keptLine)
	for sent := 0; ; {
		n, err := io.ReadFull(r, piece)
		if n > 0 {
			if _, err := fmt.Fprintln(console, Kept+base64.StdEncoding.EncodeToString(piece[:n])); err != nil {
				return errors.Join(err, r.Close())
			}
		}
		switch sent += n; {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return nil
		case err != nil:
			return fmt.Errorf("keeping %s: %w", dir, err)
		case sent > keptBytes:
			return errors.Join(fmt.Errorf("keeping %s: it has more than %d MiB", dir, keptBytes>>20), r.Close())
		}
	}
}

// keptFile is what a guest's console has of an archive, one after the other where several steps failed.
type keptFile struct {
	path string
	f    *os.File
}

// add takes the text of one line.
func (k *keptFile) add(text string) error {
	piece, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return err
	}
	if k.f == nil {
		if err := os.MkdirAll(filepath.Dir(k.path), 0o755); err != nil {
			return err
		}
		if k.f, err = os.Create(k.path); err != nil {
			return err
		}
	}
	_, err = k.f.Write(piece)
	return err
}

// close tells where the archive is; empty: nothing was kept.
func (k *keptFile) close() (path string, err error) {
	if k.f == nil {
		return "", nil
	}
	return k.path, k.f.Close()
}
