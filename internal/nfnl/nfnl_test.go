package nfnl

import (
	"bytes"
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

func TestWhatIsWrittenIsRead(t *testing.T) {
	var w Writer
	for seq := range uint32(3) {
		w.Begin(1, 2, 4, seq, 10, 7)
		w.Uint8(1, 9)
		w.Nest(2, func() { w.Uint16(3, 0x1234); w.Uint32(4, 0xdeadbeef) })
		w.Bytes(5, []byte("abcde"))
		w.End()
	}
	seq := uint32(0)
	for m := range Messages(w.B) {
		if m.Seq != seq || m.Type != 0x102 || m.Flags != 5 || m.Data[0] != 10 || m.Data[3] != 7 {
			t.Errorf("message %d: %+v", seq, m)
		}
		seq++
		got := map[uint16][]byte{}
		for typ, v := range Attributes(m.Attributes()) {
			got[typ] = v
		}
		if len(got) != 3 || !bytes.Equal(got[1], []byte{9}) || string(got[5]) != "abcde" {
			t.Errorf("attributes: %v", got)
		}
		for typ, v := range Attributes(got[2]) {
			if typ == 3 && !bytes.Equal(v, []byte{0x12, 0x34}) || typ == 4 && !bytes.Equal(v, []byte{0xde, 0xad, 0xbe, 0xef}) {
				t.Errorf("nested %d: %x", typ, v)
			}
		}
	}
	if seq != 3 {
		t.Errorf("%d messages", seq)
	}
}

// TestAnswers: an acknowledgement, an error, the end of a dump, and what is neither.
func TestAnswers(t *testing.T) {
	minus := func(e unix.Errno) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(-int32(e))) }
	for _, c := range []struct {
		m    Message
		want unix.Errno
		ok   bool
	}{
		{Message{Type: unix.NLMSG_ERROR, Data: minus(0)}, 0, true},
		{Message{Type: unix.NLMSG_ERROR, Data: minus(unix.EEXIST)}, unix.EEXIST, true},
		{Message{Type: unix.NLMSG_DONE, Data: minus(0)}, 0, true},
		{Message{Type: unix.NLMSG_DONE, Data: minus(unix.ENOBUFS)}, unix.ENOBUFS, true},
		{Message{Type: unix.NLMSG_ERROR}, 0, false},
		{Message{Type: 0x100, Data: minus(unix.EEXIST)}, 0, false},
	} {
		if got, ok := c.m.Err(); got != c.want || ok != c.ok {
			t.Errorf("%+v: %d, %t", c.m, got, ok)
		}
	}
}

func FuzzMessages(f *testing.F) {
	var w Writer
	w.Begin(1, 2, 4, 1, 10, 7)
	w.Nest(2, func() { w.Uint16(3, 0x1234) })
	w.End()
	f.Add(w.B)
	f.Fuzz(func(t *testing.T, b []byte) {
		for m := range Messages(b) {
			m.Err()
			for _, v := range Attributes(m.Attributes()) {
				for range Attributes(v) {
				}
			}
		}
	})
}
