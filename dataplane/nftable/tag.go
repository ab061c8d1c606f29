package nftable

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
)

// tag is how a rule is known again: its comment.
func (r Rule) tag() string {
	b := make([]byte, 0, 1024)
	b = appendText(b, r.Text)
	for _, e := range r.Exprs {
		b = appendExpr(b, e)
	}
	h := sha256.Sum256(b)
	return "skein " + hex.EncodeToString(h[:6])
}

// appendExpr appends all that an expression says. The kinds that most rules are made of are written field by field:
// this runs whenever a table is compared.
func appendExpr(b []byte, e expr.Any) []byte {
	switch e := e.(type) {
	case *expr.Meta:
		return appendNumbers(append(b, 'm'), uint64(e.Key), flag(e.SourceRegister), uint64(e.Register))
	case *expr.Cmp:
		return appendText(appendNumbers(append(b, 'c'), uint64(e.Op), uint64(e.Register)), string(e.Data))
	case *expr.Bitwise:
		b = appendNumbers(append(b, 'b'), uint64(e.SourceRegister), uint64(e.DestRegister), uint64(e.Len))
		return appendText(appendText(b, string(e.Mask)), string(e.Xor))
	case *expr.Payload:
		return appendNumbers(append(b, 'p'), uint64(e.OperationType), uint64(e.DestRegister), uint64(e.SourceRegister),
			uint64(e.Base), uint64(e.Offset), uint64(e.Len), uint64(e.CsumType), uint64(e.CsumOffset), uint64(e.CsumFlags))
	case *expr.Lookup:
		b = appendNumbers(append(b, 'l'), uint64(e.SourceRegister), uint64(e.DestRegister), flag(e.IsDestRegSet),
			uint64(e.SetID), flag(e.Invert))
		return appendText(b, e.SetName)
	case *expr.Immediate:
		return appendText(appendNumbers(append(b, 'i'), uint64(e.Register)), string(e.Data))
	case *expr.Verdict:
		return appendText(appendNumbers(append(b, 'v'), uint64(e.Kind)), e.Chain)
	case *expr.Ct:
		return appendNumbers(append(b, 't'), uint64(e.Register), flag(e.SourceRegister), uint64(e.Key), uint64(e.Direction))
	case *expr.Counter:
		return appendNumbers(append(b, 'n'), e.Bytes, e.Packets)
	case *expr.Target:
		if info, ok := e.Info.(*xt.Unknown); ok {
			return fmt.Appendf(b, "target %s %d %v\n", e.Name, e.Rev, *info)
		}
	}
	return fmt.Appendf(b, "%T %+v\n", e, e)
}

func appendNumbers(b []byte, ns ...uint64) []byte {
	for _, n := range ns {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

// appendText appends a text with its length.
func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func flag(on bool) uint64 {
	if on {
		return 1
	}
	return 0
}
