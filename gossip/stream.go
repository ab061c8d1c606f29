package gossip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// The record protocol. A stream starts with streamMagic and streamVersion; then frames follow, each a
// kind, a length and a protobuf message.
//
//	client: Have (all its digests) or Want (some)
//	server: Records* Want        what the client lacks, then what the server lacks (may be empty)
//	client: Records*, close
//
// HaveSite and WantSite are the same for the records of a site; both ends must be in that site. A client of another
// site sends an empty Fetch, and gets all records of the site:
//
//	client: Fetch
//	server: Records* Want        which is empty
const (
	streamMagic   = 0x5c // memberlist's streams start with 10
	streamVersion = 1

	frameHave     = 1
	frameWant     = 2
	frameRecords  = 3
	frameHaveSite = 4
	frameWantSite = 5
	frameFetch    = 6

	frameHeader = 1 + 4
	// recordsPerFrame keeps a frame of largest records below maxRecordsFrame.
	recordsPerFrame = 32
	maxRecordsFrame = recordsPerFrame * (MaxRecordBytes + 64)
)

var errFrame = errors.New("record stream is malformed")

func frameLimit(kind byte) int {
	switch kind {
	case frameHave, frameWant, frameHaveSite, frameWantSite, frameFetch:
		return maxDigestBytes
	case frameRecords:
		return maxRecordsFrame
	}
	return -1
}

func writeFrame(w io.Writer, kind byte, m proto.Message) error {
	b := make([]byte, frameHeader, frameHeader+proto.Size(m))
	b, err := proto.MarshalOptions{}.MarshalAppend(b, m)
	if err != nil {
		return fmt.Errorf("encode frame %d: %w", kind, err)
	}
	n := len(b) - frameHeader
	if n > frameLimit(kind) {
		return fmt.Errorf("frame %d of %d bytes, the limit is %d", kind, n, frameLimit(kind))
	}
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(n))
	_, err = w.Write(b)
	return err
}

// readFrame reads one frame; memory grows with what arrives and not with what is announced.
func readFrame(r io.Reader) (kind byte, payload []byte, err error) {
	var h [frameHeader]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, nil, err
	}
	n := int64(binary.BigEndian.Uint32(h[1:]))
	limit := frameLimit(h[0])
	if limit < 0 {
		return 0, nil, fmt.Errorf("%w: frame of kind %d", errFrame, h[0])
	}
	if n > int64(limit) {
		return 0, nil, fmt.Errorf("%w: frame of kind %d with %d bytes, the limit is %d", errFrame, h[0], n, limit)
	}
	var b bytes.Buffer
	if got, err := io.CopyN(&b, r, n); err != nil {
		return 0, nil, fmt.Errorf("%w: frame of kind %d ends after %d of %d bytes", errFrame, h[0], got, n)
	}
	return h[0], b.Bytes(), nil
}

func decodeRecords(b []byte) ([]*skeinv1.SignedRecord, error) {
	var m skeinv1.Records
	if err := unmarshal.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("%w: records: %w", errFrame, err)
	}
	if n := len(m.GetRecords()); n > recordsPerFrame {
		return nil, fmt.Errorf("%w: %d records in a frame, the limit is %d", errFrame, n, recordsPerFrame)
	}
	return m.GetRecords(), nil
}

func writeRecords(w io.Writer, records []*skeinv1.SignedRecord) error {
	for len(records) > 0 {
		n := min(len(records), recordsPerFrame)
		if err := writeFrame(w, frameRecords, &skeinv1.Records{Records: records[:n]}); err != nil {
			return err
		}
		records = records[n:]
	}
	return nil
}

// exchange holds what both ends of a record stream need of the node.
type exchange struct {
	self   identity.ID
	tables [2]*table
	member func(identity.ID) bool
	// wanted reports whether a version would be kept.
	take func([]*skeinv1.SignedRecord) int
	// wanted tells whether a version would be taken in.
	wanted func(tableKind, mark) bool
	// near reports whether a member is in this node's site.
	near func(identity.ID) bool
	// site returns the records for a member of another site that sends Fetch.
	site func(identity.ID) ([]*skeinv1.SignedRecord, error)
}

// ask runs the client's end. With want it asks for those records only, otherwise it exchanges digests. It returns how
// many records were new at either end, as far as the client can tell.
func (x *exchange) ask(conn io.ReadWriter, t tableKind, want []mark) (changed int, err error) {
	if _, err := conn.Write([]byte{streamMagic, streamVersion}); err != nil {
		return 0, err
	}
	kind, marks := [2]byte{frameWant, frameWantSite}[t], want
	if want == nil {
		kind, marks = [2]byte{frameHave, frameHaveSite}[t], x.tables[t].digest()
	}
	if err := writeFrame(conn, kind, encodeDigests(x.self, marks)); err != nil {
		return 0, err
	}
	for budget := maxDigests; ; {
		kind, payload, err := readFrame(conn)
		if err != nil {
			return changed, err
		}
		switch kind {
		case frameRecords:
			records, err := decodeRecords(payload)
			if err != nil {
				return changed, err
			}
			if budget -= len(records); budget < 0 {
				return changed, fmt.Errorf("%w: more than %d records", errFrame, maxDigests)
			}
			changed += x.take(records)
		case frameWant:
			_, asked, err := decodeDigests(payload)
			if err != nil {
				return changed, err
			}
			send := x.tables[t].newerThan(asked)
			return changed + len(send), writeRecords(conn, send)
		default:
			return changed, fmt.Errorf("%w: unexpected frame of kind %d", errFrame, kind)
		}
	}
}

// answer runs the server's end; the magic byte has been seen but not consumed.
func (x *exchange) answer(conn io.ReadWriter, peer identity.ID) error {
	var head [2]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return err
	}
	if head[0] != streamMagic || head[1] != streamVersion {
		return fmt.Errorf("%w: version %d, want %d", errFrame, head[1], streamVersion)
	}
	kind, payload, err := readFrame(conn)
	if err != nil {
		return err
	}
	t := meshTable
	switch kind {
	case frameHave, frameWant:
	case frameHaveSite, frameWantSite:
		if t = siteTable; !x.near(peer) {
			return fmt.Errorf("%w: records of this site are for its nodes, and node %s is of another", errFrame, peer)
		}
	case frameFetch:
		records, err := x.site(peer)
		if err != nil {
			return err
		}
		if err := writeRecords(conn, records); err != nil {
			return err
		}
		return writeFrame(conn, frameWant, encodeDigests(x.self, nil))
	default:
		return fmt.Errorf("%w: unexpected frame of kind %d", errFrame, kind)
	}
	_, theirs, err := decodeDigests(payload)
	if err != nil {
		return err
	}
	var send []*skeinv1.SignedRecord
	var want []mark
	if kind == frameHave || kind == frameHaveSite {
		send, want = x.tables[t].diff(theirs, x.member)
		want = slices.DeleteFunc(want, func(m mark) bool { return !x.wanted(t, m) })
	} else {
		send = x.tables[t].newerThan(theirs)
	}
	if err := writeRecords(conn, send); err != nil {
		return err
	}
	if err := writeFrame(conn, frameWant, encodeDigests(x.self, want)); err != nil {
		return err
	}
	for n := 0; n < len(want); {
		kind, payload, err := readFrame(conn)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) {
			return nil // the client no longer has all records that were wanted
		}
		if err != nil {
			return err
		}
		if kind != frameRecords {
			return fmt.Errorf("%w: unexpected frame of kind %d", errFrame, kind)
		}
		records, err := decodeRecords(payload)
		if err != nil {
			return err
		}
		n += max(1, len(records))
		x.take(records)
	}
	return nil
}
