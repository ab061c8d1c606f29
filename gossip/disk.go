package gossip

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/wholefile"
)

const (
	recordsFile  = "gossip.records"
	epochFile    = "gossip.epoch"
	recordsMagic = "skein records v1\n"
	// maxRecordsFile bounds what is read back: maxDigests records of the largest size.
	maxRecordsFile = maxDigests * (MaxRecordBytes + 16)
)

// ErrDamaged is wrapped by errors about a file that does not match its checksum.
var ErrDamaged = errors.New("file is damaged")

// encodeRecords is the file's content: magic, SHA-256 of the rest, Records.
func encodeRecords(records []*skeinv1.SignedRecord) ([]byte, error) {
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(&skeinv1.Records{Records: records})
	if err != nil {
		return nil, fmt.Errorf("encode records: %w", err)
	}
	sum := sha256.Sum256(body)
	b := append(make([]byte, 0, len(recordsMagic)+len(sum)+len(body)), recordsMagic...)
	return append(append(b, sum[:]...), body...), nil
}

func decodeRecordsFile(b []byte) ([]*skeinv1.SignedRecord, error) {
	rest, ok := bytes.CutPrefix(b, []byte(recordsMagic))
	if !ok || len(rest) < sha256.Size {
		return nil, errors.New("it does not start as a records file")
	}
	sum, body := [sha256.Size]byte(rest), rest[sha256.Size:]
	if sha256.Sum256(body) != sum {
		return nil, errors.New("its checksum does not match")
	}
	var m skeinv1.Records
	if err := unmarshal.Unmarshal(body, &m); err != nil {
		return nil, err
	}
	return m.GetRecords(), nil
}

// loadRecords reads the records of the last run. A damaged file is left as it is.
func loadRecords(dir string) ([]*skeinv1.SignedRecord, error) {
	path := filepath.Join(dir, recordsFile)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read known records: %w", err)
	}
	if info.Size() > maxRecordsFile {
		return nil, damagedRecords(path, fmt.Errorf("it has %d bytes, the limit is %d", info.Size(), maxRecordsFile))
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read known records: %w", err)
	}
	records, err := decodeRecordsFile(b)
	if err != nil {
		return nil, damagedRecords(path, err)
	}
	return records, nil
}

func damagedRecords(path string, cause error) error {
	return fmt.Errorf("%w: %s: %w: it only caches what other nodes say of themselves, so move it away and start again "+
		"(mv %s %s.damaged)",
		ErrDamaged, path, cause, path, path)
}

func saveRecords(dir string, records []*skeinv1.SignedRecord) error {
	b, err := encodeRecords(records)
	if err != nil {
		return err
	}
	return wholefile.Replace(filepath.Join(dir, recordsFile), b)
}

// NextEpoch counts one more start of this node and returns the count. The clock has no part in it.
func NextEpoch(dir string) (uint64, error) {
	last, err := loadEpoch(dir)
	if err != nil {
		return 0, err
	}
	return last + 1, saveEpoch(dir, last+1)
}

// raiseEpoch makes the next start count from beyond an epoch that was seen.
func raiseEpoch(dir string, seen uint64) error {
	last, err := loadEpoch(dir)
	if err != nil || last >= seen {
		return err
	}
	return saveEpoch(dir, seen)
}

func loadEpoch(dir string) (uint64, error) {
	path := filepath.Join(dir, epochFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the epoch: %w", err)
	}
	n, err := decodeEpoch(string(b))
	if err != nil {
		return 0, fmt.Errorf("%w: %s: %w: if its first word is still a number, write that number plus one with its "+
			"checksum; else move the file away: the node sees its own older records when it meets others and counts on from "+
			"there", ErrDamaged, path, err)
	}
	return n, nil
}

// decodeEpoch reads "NUMBER CHECKSUM\n".
func decodeEpoch(s string) (uint64, error) {
	number, sum, ok := strings.Cut(strings.TrimSuffix(s, "\n"), " ")
	if !ok || sum != epochSum(number) {
		return 0, errors.New("its checksum does not match")
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return 0, err
	}
	if n >= maxNumber {
		return 0, fmt.Errorf("epoch %d is beyond %d", n, uint64(maxNumber))
	}
	return n, nil
}

func epochSum(number string) string {
	h := sha256.Sum256([]byte("skein epoch v1 " + number))
	return hex.EncodeToString(h[:8])
}

func saveEpoch(dir string, n uint64) error {
	number := strconv.FormatUint(n, 10)
	return wholefile.Replace(filepath.Join(dir, epochFile), []byte(number+" "+epochSum(number)+"\n"))
}
