package redteam

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// The record protocol of package gossip, as its stream.go draws it.
const (
	recordMagic, recordVersion            = 0x5c, 1
	frameHave, frameWant, frameRecordList = 1, 2, 3
	frameHaveSite, frameFetch             = 4, 6
)

// records are what a server has of a node.
func (f *Field) record(ctx context.Context, name string) (*skeinv1.Record, error) {
	r, err := f.api(relayNode).ShowNode(ctx, &skeinv1.ShowNodeRequest{Node: name})
	return r.GetNode().GetRecord(), err
}

// push brings records to a server by the record protocol: the attacker says that it has them, and hands them over when
// asked.
func (p *person) push(ctx context.Context, to string, records ...*skeinv1.SignedRecord) (refusal string, err error) {
	return p.pushAs(ctx, to, frameHave, records...)
}

// pushAs is push with the frame by which digests are told.
func (p *person) pushAs(ctx context.Context, to string, have byte, records ...*skeinv1.SignedRecord) (
	refusal string, err error) {
	c, err := p.Dial(ctx, p.field.id(to), identity.ALPNGossip)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	digests := &skeinv1.Digests{From: p.id()}
	for _, s := range records {
		r := &skeinv1.Record{}
		if err := proto.Unmarshal(s.GetRecord(), r); err != nil {
			return "", err
		}
		sum := sha256.Sum256(s.GetRecord())
		digests.Have = append(digests.Have, &skeinv1.RecordDigest{NodeId: r.GetNodeId(), Epoch: max(r.GetEpoch(), 1<<40),
			Seq: r.GetSeq(), Sum: sum[:8]})
	}
	if _, err := c.Write([]byte{recordMagic, recordVersion}); err != nil {
		return "", err
	}
	if err := writeRecordFrame(c, have, digests); err != nil {
		return "", err
	}
	for { // what the server sends of its own comes first
		kind, err := skipFrame(c)
		if err != nil {
			return "the server ends the exchange: " + err.Error(), nil
		}
		if kind == frameWant {
			break
		}
	}
	if err := writeRecordFrame(c, frameRecordList, &skeinv1.Records{Records: records}); err != nil {
		return err.Error(), nil
	}
	_, err = heard(c, arrival)
	if err != nil {
		refusal = err.Error()
	}
	return refusal, nil
}

func writeRecordFrame(w io.Writer, kind byte, m proto.Message) error {
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 5), m)
	if err != nil {
		return err
	}
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(len(b)-5))
	_, err = w.Write(b)
	return err
}

func skipFrame(r io.Reader) (kind byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, err
	}
	_, err = io.CopyN(io.Discard, r, int64(binary.BigEndian.Uint32(head[1:])))
	return head[0], err
}

// recordAttempt pushes a record and reads what the server has of the node that it names.
func recordAttempt(name, of string, guard Guard, forge func(context.Context, *Field) (*skeinv1.SignedRecord, error),
	judge func(Seen) string) Attempt {
	return Attempt{Name: name, From: Member, Guard: guard, Judge: judge,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			s, err := forge(ctx, f)
			if err != nil {
				return seen, err
			}
			before, err := f.record(ctx, of)
			if err != nil {
				return seen, err
			}
			if seen.Refusal, err = f.puppet.push(ctx, relayNode, s); err != nil {
				return seen, err
			}
			pause.For(ctx, 300*time.Millisecond)
			after, err := f.record(ctx, of)
			seen.Records = []*skeinv1.Record{before, after}
			return seen, err
		}}
}

// What forged records say: a site, and epochs that no agent reaches by starting.
const (
	forgedSite  = "forged-by-the-red-team"
	forgedEpoch = 1 << 41
)

// forgedRecord judges that the server has taken in what the attacker wrote.
func forgedRecord(s Seen) string {
	if s.Records[1].GetSite() == forgedSite {
		return "the record is taken for the node's own"
	}
	// A node that meets a record of its own that it did not write outbids it at once.
	if s.Records[0].GetEpoch() < forgedEpoch && s.Records[1].GetEpoch() >= forgedEpoch {
		return "the record was taken for the node's own, until the node outbid it"
	}
	return olderRecord(s)
}

func olderRecord(s Seen) string {
	b, a := s.Records[0], s.Records[1]
	if a.GetEpoch() < b.GetEpoch() || a.GetEpoch() == b.GetEpoch() && a.GetSeq() < b.GetSeq() {
		return "an older record replaces a newer one"
	}
	return ""
}

// signed is a record signed by a person.
func signed(p *person, r *skeinv1.Record) (*skeinv1.SignedRecord, error) {
	return gossip.Sign(p.key, r)
}

func memberGossip() []Attempt {
	return []Attempt{
		recordAttempt("write another node's record, signed by itself", victim, Signatures,
			func(_ context.Context, f *Field) (*skeinv1.SignedRecord, error) {
				return signed(f.mallory, &skeinv1.Record{NodeId: f.id(victim).String(), Epoch: forgedEpoch, Seq: 1,
					Site: forgedSite})
			}, forgedRecord),
		recordAttempt("write another node's record without a signature", victim, Signatures,
			func(_ context.Context, f *Field) (*skeinv1.SignedRecord, error) {
				s, err := signed(f.mallory, &skeinv1.Record{NodeId: f.id(victim).String(), Epoch: forgedEpoch, Seq: 2,
					Site: forgedSite})
				if err != nil {
					return nil, err
				}
				s.Signature = nil
				return s, nil
			}, forgedRecord),
		recordAttempt("write the record of a node that nobody admitted", relayNode, Roster,
			func(_ context.Context, f *Field) (*skeinv1.SignedRecord, error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return nil, err
				}
				return signed(p, &skeinv1.Record{NodeId: p.id(), Epoch: 1, Seq: 1, Site: forgedSite})
			}, forgedRecord),
		{Name: "replay an older record of its own after a newer one", From: Member, Guard: Signatures,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				for _, seq := range []uint64{20, 10} {
					s, err := signed(f.puppet, &skeinv1.Record{NodeId: f.puppet.id(), Epoch: 1, Seq: seq, Site: "s"})
					if err != nil {
						return seen, err
					}
					if seen.Refusal, err = f.puppet.push(ctx, relayNode, s); err != nil {
						return seen, err
					}
					var r *skeinv1.Record
					err = until(ctx, patience, func() error {
						if r, err = f.record(ctx, "puppet"); err == nil && r.GetSeq() < 10 {
							err = errors.New("the server has no record of the puppet")
						}
						return err
					})
					if err != nil {
						return seen, err
					}
					seen.Records = append(seen.Records, r)
				}
				return seen, nil
			}, Judge: olderRecord},
		tooLarge("publish a record of 9 KiB", func(r *skeinv1.Record) {
			for i := range 30 {
				r.NodeAddresses = append(r.NodeAddresses, fmt.Sprintf("10.%d.0.0/16", i))
			}
			r.Labels = manyLabels(30, 250)
		}),
		tooLarge("publish 65 candidates", func(r *skeinv1.Record) {
			for i := range 65 {
				r.Candidates = append(r.Candidates, &skeinv1.Candidate{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST,
					Address: fmt.Sprintf("198.18.9.%d:51820", i+1), Priority: 100})
			}
		}),
		tooLarge("publish a label of 5 KiB", func(r *skeinv1.Record) { r.Labels = manyLabels(1, 5<<10) }),
		{Name: "name a bystander's ports as its own addresses, so that all members send there", From: Member, Guard: Proof,
			Long: true, Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.ownAddresses(ctx)
			}, Judge: bounded("packets at a host that never asked for any")},
		{Name: "declare another member dead in the gossip", From: Member, Guard: Signatures, Long: true,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.declareDead(ctx, f.mallory.ns)
			}, Judge: believedLong},
	}
}

// tooLarge publishes a record of the puppet's own that is beyond a limit.
func tooLarge(name string, grow func(*skeinv1.Record)) Attempt {
	return recordAttempt(name, "puppet", Limits, func(_ context.Context, f *Field) (*skeinv1.SignedRecord, error) {
		r := &skeinv1.Record{NodeId: f.puppet.id(), Epoch: 1 << 42, Seq: 1, Site: forgedSite}
		grow(r)
		return signed(f.puppet, r)
	}, forgedRecord)
}

// manyLabels are labels with values of a length.
func manyLabels(count, length int) map[string]string {
	out := map[string]string{}
	for i := range count {
		out[fmt.Sprintf("red-team-%d", i)] = strings.Repeat("x", length)
	}
	return out
}

// ownAddresses publishes a bystander's ports as the puppet's candidates and counts what comes.
func (f *Field) ownAddresses(ctx context.Context) (seen Seen, err error) {
	const first, count, each = 20000, 64, 4 * time.Second
	// Three pings of each member to each of the few addresses that its budget for unproven ones holds, twice what was
	// measured.
	members := len(honest) + 1
	seen.Bound = 3 * 8 * members
	wg, err := f.puppet.wg.Public()
	if err != nil {
		return seen, err
	}
	r := &skeinv1.Record{NodeId: f.puppet.id(), Epoch: 1 << 43, Seq: 1, WireguardKey: wg[:],
		NatType: skeinv1.NatType_NAT_TYPE_NONE}
	at := f.address(bystander)
	for i := range count {
		r.Candidates = append(r.Candidates, &skeinv1.Candidate{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX,
			Address: netip.AddrPortFrom(at, uint16(first+i)).String(), Priority: 200, Source: "stun"})
	}
	s, err := signed(f.puppet, r)
	if err != nil {
		return seen, err
	}
	err = sniff(f.ns(bystander), func(b []byte, out bool) {
		if _, to, _, ok := udpOf(b); ok && !out && to.Addr() == at && to.Port() >= first && to.Port() < first+count {
			seen.Count++
		}
	}, func() error {
		if seen.Refusal, err = f.puppet.push(ctx, relayNode, s); err != nil {
			return err
		}
		pause.For(ctx, each)
		return ctx.Err()
	})
	if seen.Count == 0 && err == nil {
		err = errors.New("no member has tried an address: the record was not spread")
	}
	return seen, err
}

// sealed encrypts a message of memberlist with the gossip key, as its security.go does (version 1: AES-GCM, no
// padding).
func sealed(key, message []byte) ([]byte, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, gcm.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	return gcm.Seal(append([]byte{1}, nonce...), nonce, message, nil), nil
}

// deadMessage is memberlist's word that a node is dead: type 5, and a map in msgpack.
func deadMessage(node, from string, incarnation uint32) []byte {
	text := func(b []byte, s string) []byte { return append(append(b, 0xa0|byte(len(s))), s...) } // up to 31 bytes
	b := []byte{5, 0x83}
	b = append(text(b, "Incarnation"), 0xce)
	b = binary.BigEndian.AppendUint32(b, incarnation)
	b = text(text(b, "Node"), node)
	return text(text(b, "From"), from)
}

// Channels of the control net, and the mark of a packet by the tunnel that carries a code (package control).
const (
	channelGossip = 1
	channelSignal = 2
	coded         = 0x80
)

// code authenticates a packet to a node with the key of the pair, as from a sender.
func (p *person) code(from identity.ID, to *skeinv1.Node, channel byte, b []byte) ([]byte, error) {
	cluster, err := identity.ParseClusterID(p.field.members.GetCluster().GetId())
	if err != nil {
		return nil, err
	}
	key, err := identity.PairKey(p.wg, identity.WireGuardKey(to.GetWireguardKey()), cluster, "control packet")
	if err != nil {
		return nil, err
	}
	m := hmac.New(sha256.New, key[:])
	m.Write(from[:])
	m.Write([]byte{channel})
	m.Write(b)
	return m.Sum(nil)[:16], nil
}

// declareDead sends that message to a server from a namespace for a while, and watches whether the server believes it
// for long.
func (f *Field) declareDead(ctx context.Context, ns string) (seen Seen, err error) {
	b, err := sealed(f.members.GetGossipKeys().GetPrimary(), deadMessage(f.id(victim).String(), f.mallory.id(), 1<<20))
	if err != nil {
		return seen, err
	}
	c, err := dialUDP(ns, netip.AddrPortFrom(f.overlay(relayNode, true), controlPort))
	if err != nil {
		return seen, err
	}
	defer c.Close()
	// With the code that the attacker's own agent would put on it, and without.
	code, err := f.mallory.code(f.mallory.key.ID(), f.member(relayNode), channelGossip, b)
	if err != nil {
		return seen, err
	}
	for range 5 {
		for _, packet := range [][]byte{append([]byte{channelGossip}, b...),
			slices.Concat([]byte{channelGossip | coded}, code, b)} {
			if _, err := c.Write(packet); err != nil {
				seen.Refusal = err.Error()
			}
		}
	}
	// A dead message is believed until its node refutes it, which takes a round of gossip.
	var began, ended time.Time
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		r, err := f.api(relayNode).ShowNode(ctx, &skeinv1.ShowNodeRequest{Node: victim})
		if err != nil {
			return seen, err
		}
		switch alive := r.GetNode().GetAlive(); {
		case !alive && began.IsZero():
			began = time.Now()
		case alive && !began.IsZero() && ended.IsZero():
			ended = time.Now()
		}
		pause.For(ctx, 10*time.Millisecond)
	}
	switch {
	case began.IsZero():
	case ended.IsZero():
		seen.Believed = time.Since(began)
	default:
		seen.Believed = ended.Sub(began)
	}
	return seen, nil
}

// believed judges that a false word about a member was believed at all, by somebody who may not speak.
func believed(s Seen) string {
	if s.Believed > 0 {
		return fmt.Sprintf("a living member passes for dead for %s", s.Believed.Round(time.Millisecond))
	}
	return ""
}

// believedLong judges the same of somebody who may: memberlist lets members suspect each other, and the victim has the
// last word.
func believedLong(s Seen) string {
	if s.Believed > 2*time.Second {
		return believed(s)
	}
	return ""
}

// gossipKey attempts have the key, and no identity of a member.
func gossipKey() []Attempt {
	return []Attempt{
		{Name: "declare a member dead from a pod", From: GossipKey, Guard: LinkSources,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.declareDead(ctx, f.podNS(hostilePod))
			}, Judge: believed},
		{Name: "declare a member dead from the LAN, with a member's overlay address as source", From: GossipKey,
			Guard: LinkSources, Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				key := f.members.GetGossipKeys().GetPrimary()
				b, err := sealed(key, deadMessage(f.id(other).String(), f.id(relayNode).String(), 1<<21))
				if err != nil {
					return seen, err
				}
				r, err := openRaw(f.ns(lodger), "eth0", f.address(victim))
				if err != nil {
					return seen, err
				}
				defer r.close()
				packet := datagram(netip.AddrPortFrom(f.overlay(relayNode, true), controlPort),
					netip.AddrPortFrom(f.overlay(victim, true), controlPort), append([]byte{1}, b...))
				for range 100 {
					if err := r.send(packet); err != nil {
						return seen, err
					}
					n, err := f.api(victim).ShowNode(ctx, &skeinv1.ShowNodeRequest{Node: other})
					if err != nil {
						return seen, err
					}
					if !n.GetNode().GetAlive() {
						seen.Lost = append(seen.Lost, "the member in the LAN takes "+other+" for dead")
						break
					}
					pause.For(ctx, 10*time.Millisecond)
				}
				return seen, nil
			}, Judge: lost},
		{Name: "open a gossip stream with an identity of its own", From: GossipKey, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return seen, err
				}
				p.ns, p.tunnel = f.mallory.ns, true // even where the tunnel is
				c, err := p.Dial(ctx, f.id(relayNode), identity.ALPNGossip)
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				defer c.Close()
				_, _ = c.Write([]byte{recordMagic, recordVersion})
				_ = writeRecordFrame(c, frameHave, &skeinv1.Digests{})
				seen.hear(c, "records")
				return seen, nil
			}, Judge: given},
	}
}
