package nfnl

import (
	"bytes"
	"testing"
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
