package gossip

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"io"
	"log/slog"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func drawMark(t *rapid.T) mark {
	m := mark{Epoch: rapid.Uint64Range(0, 3).Draw(t, "epoch"), Seq: rapid.Uint64Range(0, 3).Draw(t, "seq")}
	m.ID[7] = rapid.ByteRange(0, 2).Draw(t, "id") // few, so that versions of one record meet
	m.Sum[0] = rapid.ByteRange(0, 2).Draw(t, "sum")
	return m
}

func TestMetaRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, large := drawMark(t), rapid.Bool().Draw(t, "large")
		b := encodeMeta(m, large)
		got, gotLarge, err := decodeMeta(append(b, 1, 2, 3))
		if err != nil || got != m || gotLarge != large || len(b) != metaSize {
			t.Fatalf("%+v %v %v, want %+v %v", got, gotLarge, err, m, large)
		}
	})
}

// In whatever order versions arrive, every node ends with the same one: that of the highest epoch, then of the
// highest seq, then of the lowest sum.
func TestMergeOrderDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		marks := rapid.SliceOfN(rapid.Custom(drawMark), 1, 12).Draw(t, "marks")
		a, b := newTable(), newTable()
		newest := map[identity.ID]mark{}
		for i, m := range marks {
			a.put(Entry{}, m)
			b.put(Entry{}, marks[len(marks)-1-i])
			if old, ok := newest[m.ID]; !ok || cmp.Or(cmp.Compare(m.Epoch, old.Epoch), cmp.Compare(m.Seq, old.Seq),
				bytes.Compare(old.Sum[:], m.Sum[:])) > 0 {
				newest[m.ID] = m
			}
		}
		for _, have := range []*table{a, b} {
			if len(have.digest()) != len(newest) {
				t.Fatalf("%d records are held, want %d", len(have.digest()), len(newest))
			}
			for _, m := range have.digest() {
				if m != newest[m.ID] {
					t.Fatalf("%+v is held, want %+v", m, newest[m.ID])
				}
			}
		}
		if a.hash() != b.hash() {
			t.Fatalf("hashes differ: %v and %v", a.digest(), b.digest())
		}
	})
}

// After one exchange of digests both ends hold the same records.
func TestExchangeMakesEqual(t *testing.T) {
	var keys []*identity.Key
	for i := range 80 {
		keys = append(keys, simKey(i))
	}
	roster := newRoster(keys...)
	a, b := bareGossip(roster), bareGossip(roster)
	for i, k := range keys {
		r := simRecord("x")
		r.NodeId, r.Epoch = k.ID().String(), 1
		older, err := Sign(k, r)
		if err != nil {
			t.Fatal(err)
		}
		r.Seq = 1
		newer, err := Sign(k, r)
		if err != nil {
			t.Fatal(err)
		}
		switch i % 4 {
		case 0:
			a.Merge([]*skeinv1.SignedRecord{newer})
			b.Merge([]*skeinv1.SignedRecord{older})
		case 1:
			a.Merge([]*skeinv1.SignedRecord{older})
			b.Merge([]*skeinv1.SignedRecord{newer})
		case 2:
			a.Merge([]*skeinv1.SignedRecord{newer})
		case 3:
			b.Merge([]*skeinv1.SignedRecord{newer})
		}
	}
	near, far := net.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- b.exchange().answer(far, a.cfg.Self)
		far.Close()
	}()
	if _, err := a.exchange().ask(near, meshTable, nil); err != nil {
		t.Fatal(err)
	}
	near.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if a.Hash() != b.Hash() || len(a.Records()) != len(keys) {
		t.Errorf("%d and %d records after the exchange, want %d on both sides", len(a.Records()), len(b.Records()), len(keys))
	}
}

func TestFrameLimits(t *testing.T) {
	frame := func(kind byte, announced uint32, payload int) []byte {
		b := binary.BigEndian.AppendUint32([]byte{kind}, announced)
		return append(b, make([]byte, payload)...)
	}
	for name, b := range map[string][]byte{
		"unknown kind":   frame(9, 0, 0),
		"too long":       frame(frameRecords, maxRecordsFrame+1, 0),
		"far too long":   frame(frameHave, math.MaxUint32, 0),
		"ends too early": frame(frameWant, 100, 99),
		"half a header":  {frameHave, 0},
	} {
		if _, _, err := readFrame(bytes.NewReader(b)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestStreamHead(t *testing.T) {
	head := func(n uint32) []byte { return append(binary.BigEndian.AppendUint32([]byte{10}, n), 1) }
	for _, c := range []struct {
		b  []byte
		ok bool
	}{
		{head(100), true},
		{head(29), false}, // would decrypt to nothing
		{head(maxStreamMessage + 1), false},
		{append(binary.BigEndian.AppendUint32([]byte{10}, 100), 0), false},
		{append(binary.BigEndian.AppendUint32([]byte{6}, 100), 1), false}, // not encrypted
		{nil, false},
	} {
		if err := checkStreamHead(c.b); (err == nil) != c.ok {
			t.Errorf("% x: %v", c.b, err)
		}
	}
}

func FuzzMeta(f *testing.F) {
	f.Add(encodeMeta(mark{Epoch: 1, Seq: 2}, true))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, large, err := decodeMeta(b)
		if err == nil && !bytes.Equal(encodeMeta(m, large), b[:metaSize]) {
			t.Errorf("% x does not come back", b)
		}
	})
}

// FuzzPacket covers what is looked at before memberlist gets a packet, and broadcasts after it.
func FuzzPacket(f *testing.F) {
	g := bareGossip(newRoster(simKey(0)))
	s := signed(f, nil)
	r, id, _ := decodeRecord(s)
	g.broadcast(meshTable, markOf(id, r, s), s)
	f.Add(g.wide.Load().queue.GetBroadcasts(2, 1100)[0])
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = checkPacket(b)
		_ = checkStreamHead(b)
		g := bareGossip(newRoster(simKey(0)))
		(*delegate)(g.wide.Load()).NotifyMsg(b)
		select {
		case in := <-g.inbox:
			s := &skeinv1.SignedRecord{}
			if _, _, err := decodeAsk(in.data); err == nil && in.kind != askRecords {
				t.Error("a record is taken for a question")
			}
			if unmarshal.Unmarshal(in.data, s) == nil {
				g.accept(s)
			}
		default:
		}
		(*delegate)(g.wide.Load()).MergeRemoteState(b, false)
	})
}

func FuzzDigests(f *testing.F) {
	b, err := proto.Marshal(encodeDigests(simKey(1).ID(), []mark{{ID: simKey(0).ID(), Epoch: 1, Seq: 1}}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		from, marks, err := decodeDigests(b)
		if err != nil {
			return
		}
		again, err := proto.Marshal(encodeDigests(from, marks))
		if err != nil {
			t.Fatal(err)
		}
		if _, got, err := decodeDigests(again); err != nil || !slices.Equal(got, marks) {
			t.Errorf("%v does not come back: %v, %v", marks, got, err)
		}
	})
}

// FuzzAnswer feeds a whole record stream to the server's end, FuzzAsk to the client's.
func FuzzAnswer(f *testing.F) {
	var have, want bytes.Buffer
	have.Write([]byte{streamMagic, streamVersion})
	want.Write([]byte{streamMagic, streamVersion})
	d := encodeDigests(simKey(1).ID(), []mark{{ID: simKey(0).ID(), Epoch: 9, Seq: 9}})
	if writeFrame(&have, frameHave, d) != nil || writeRecords(&have, []*skeinv1.SignedRecord{signed(f, nil)}) != nil ||
		writeFrame(&want, frameWant, d) != nil {
		f.Fatal("cannot write frames")
	}
	f.Add(have.Bytes())
	f.Add(want.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		g := bareGossip(newRoster(simKey(0)))
		_ = g.exchange().answer(&script{r: bytes.NewReader(b)}, simKey(0).ID())
	})
}

func FuzzAsk(f *testing.F) {
	var b bytes.Buffer
	if writeRecords(&b, []*skeinv1.SignedRecord{signed(f, nil)}) != nil ||
		writeFrame(&b, frameWant, encodeDigests(simKey(1).ID(), nil)) != nil {
		f.Fatal("cannot write frames")
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		g := bareGossip(newRoster(simKey(0)))
		_, _ = g.exchange().ask(&script{r: bytes.NewReader(b)}, meshTable, nil)
	})
}

// script plays the other end of a stream.
type script struct{ r io.Reader }

func (s *script) Read(b []byte) (int, error)  { return s.r.Read(b) }
func (s *script) Write(b []byte) (int, error) { return len(b), nil }

func FuzzVerify(f *testing.F) {
	s := signed(f, nil)
	f.Add(s.GetRecord(), s.GetSignature())
	f.Add(signed(f, func(r *skeinv1.Record) {
		r.NodeAddresses = []string{"10.0.0.0/8"}
		r.InternalIp = "10.0.0.1"
	}).GetRecord(), []byte{})
	roster := newRoster(simKey(0))
	f.Fuzz(func(t *testing.T, record, signature []byte) {
		r, err := Verify(&skeinv1.SignedRecord{Record: record, Signature: signature}, roster)
		if err == nil && (r.GetNodeId() != simKey(0).ID().String() || len(r.GetCandidates()) > MaxCandidates) {
			t.Errorf("accepted %v", r)
		}
		if err != nil && strings.ContainsRune(err.Error(), 0x1b) {
			t.Errorf("the error carries terminal codes: %q", err)
		}
	})
}

func FuzzRecordsFile(f *testing.F) {
	b, err := encodeRecords([]*skeinv1.SignedRecord{signed(f, nil)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b, "7 "+epochSum("7")+"\n")
	f.Fuzz(func(t *testing.T, b []byte, epoch string) {
		_, _ = decodeRecordsFile(b)
		if n, err := decodeEpoch(epoch); err == nil && n >= maxNumber {
			t.Errorf("epoch %d", n)
		}
	})
}

func TestPeekedStreamKeepsItsBytes(t *testing.T) {
	g := bareGossip(newRoster(simKey(1)))
	near, far := net.Pipe()
	sent := append(binary.BigEndian.AppendUint32([]byte{10}, 40), bytes.Repeat([]byte{1}, 40)...)
	go func() {
		_, _ = near.Write(sent)
		near.Close()
	}()
	go g.dispatch(far, simKey(1).ID(), nil)
	select {
	case c := <-g.wide.Load().net.StreamCh():
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, sent) {
			t.Errorf("% x, %v", got, err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the stream did not reach memberlist")
	}
}
