package gossip

import (
	"time"

	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/identity"
)

const (
	// maxAsked bounds the marks in one packet that asks for records.
	maxAsked = 16
	// answersPerSecond and answersBurst bound the records that a node sends because packets asked for them. A packet
	// names its asker itself, so without a bound a member could make others flood a third one.
	answersPerSecond = 100
	answersBurst     = 200
)

// arrival is a user message to be handled: a request as it came, or an encoded SignedRecord.
type arrival struct {
	pool *pool
	kind byte
	data []byte
}

// encodeAsk makes a packet that asks for records at least as new as the marks.
func encodeAsk(self identity.ID, marks []mark) []byte {
	b := append(make([]byte, 0, 1+len(self)+len(marks)*markSize), askRecords)
	b = append(b, self[:]...)
	for _, m := range marks {
		b = m.append(b)
	}
	return b
}

func decodeAsk(b []byte) (from identity.ID, marks []mark, err error) {
	const head = 1 + len(from)
	if len(b) < head+markSize || len(b) > head+maxAsked*markSize || (len(b)-head)%markSize != 0 || b[0] != askRecords {
		return from, nil, errFrame
	}
	copy(from[:], b[1:])
	for b = b[head:]; len(b) > 0; b = b[markSize:] {
		marks = append(marks, decodeMark(b))
	}
	return from, marks, nil
}

// answer sends the records that a packet asks for, if they fit packets. Members may read all records anyway.
func (g *Gossip) answer(a arrival, answers *rate.Limiter) {
	from, marks, err := decodeAsk(a.data)
	if err != nil {
		g.stats.add(&g.stats.BadFrames)
		return
	}
	if from == g.cfg.Self || !g.roster.member(from) {
		g.stats.add(&g.stats.Strangers)
		return
	}
	tables := []*table{g.table}
	if a.pool.near && a.pool.speaksTo(from) {
		tables = append(tables, g.local)
	}
	for _, m := range marks {
		for _, t := range tables {
			r, ok := t.get(m.ID)
			if !ok || m.newer(r.mark) || !answers.AllowN(time.Now(), 1) {
				continue
			}
			if b, ok := g.message(answerRecord, r.mark, r.Signed); ok {
				g.stats.add(&g.stats.Answered)
				a.pool.sendTo(from, b)
			}
		}
	}
}
