package redteam

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// ask sends one frame of the record protocol and reads what comes until the node says that it is done.
func (p *person) ask(ctx context.Context, at string, kind byte) (
	records []*skeinv1.SignedRecord, frames int, err error) {
	c, err := p.Dial(ctx, p.field.id(at), identity.ALPNGossip)
	if err != nil {
		return nil, 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte{recordMagic, recordVersion}); err != nil {
		return nil, 0, err
	}
	if err := writeRecordFrame(c, kind, &skeinv1.Digests{From: p.id()}); err != nil {
		return nil, 0, err
	}
	for {
		kind, body, err := readRecordFrame(c)
		if err != nil {
			return records, frames, err
		}
		frames++
		if kind == frameWant {
			return records, frames, nil
		}
		var some skeinv1.Records
		if err := proto.Unmarshal(body, &some); err != nil {
			return records, frames, err
		}
		records = append(records, some.GetRecords()...)
	}
}

// readsSite asks a leader of dc for the records that only dc has.
func readsSite(name string, from Place, guard Guard, kind byte, who func(*Field) (*person, error)) Attempt {
	return Attempt{Name: name, From: from, Guard: guard, Judge: given,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if err := f.inSites(ctx); err != nil {
				return seen, err
			}
			p, err := who(f)
			if err != nil {
				return seen, err
			}
			_, frames, err := p.ask(ctx, relayNode, kind)
			if frames > 0 {
				seen.Given = append(seen.Given, "an answer to who may not ask")
			}
			if err != nil {
				seen.Refusal = err.Error()
			}
			return seen, nil
		}}
}

// strangerInTunnel has an identity of its own and sits where a member's tunnel is.
func strangerInTunnel(f *Field) (*person, error) {
	p, err := f.newcomer(stranger)
	if err == nil {
		p.ns, p.tunnel = f.mallory.ns, true
	}
	return p, err
}

func exileInTunnel(f *Field) (*person, error) {
	return f.person(f.exile.key, f.exile.wg, f.mallory.ns, true), nil
}

// memberInPod holds the key of a member that has no agent.
func memberInPod(f *Field) (*person, error) {
	return f.person(f.puppet.key, f.puppet.wg, f.podNS(hostilePod), true), nil
}

// siteRecords are attempts with the records that one site alone has, and that others ask it for.
func siteRecords() []Attempt {
	return []Attempt{
		readsSite("exchange records with a site as a member of another one", Member, SiteRecords, frameHaveSite,
			func(f *Field) (*person, error) { return f.mallory, nil }),
		readsSite("ask for a site's records with an identity of its own", Stranger, Roster, frameFetch, strangerInTunnel),
		readsSite("ask for a site's records", Revoked, Roster, frameFetch, exileInTunnel),
		readsSite("ask for a site's records with a member's key", Pod, PodSources, frameFetch, memberInPod),
		{Name: "ask for a site's records again and again", From: Member, Guard: Fair,
			Try: func(ctx context.Context, f *Field) (Seen, error) { return f.fetches(ctx) }, Judge: bounded("answers")},
		{Name: "ask for the record of a node that was revoked", From: Member, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (Seen, error) { return f.fetchRevoked(ctx) }, Judge: given},
		answers("answer for its site with another node's record, altered", Signatures,
			func(f *Field, genuine *skeinv1.SignedRecord, r *skeinv1.Record) (*skeinv1.SignedRecord, error) {
				b, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
				return &skeinv1.SignedRecord{Record: b, Signature: genuine.GetSignature()}, err
			}),
		answers("answer for its site with another node's record, signed by itself", Signatures,
			func(f *Field, _ *skeinv1.SignedRecord, r *skeinv1.Record) (*skeinv1.SignedRecord, error) {
				return signed(f.mallory, r)
			}),
		{Name: "answer for its site without end", From: Member, Guard: Limits,
			Try: func(ctx context.Context, f *Field) (Seen, error) { return f.endless(ctx) }, Judge: lost},
	}
}

// fetches asks a leader of another site for its records, one time after the other.
func (f *Field) fetches(ctx context.Context) (seen Seen, err error) {
	const asks, burst = 60, 8
	if err := f.inSites(ctx); err != nil {
		return seen, err
	}
	began := time.Now()
	for range asks {
		switch _, frames, err := f.mallory.ask(ctx, second, frameFetch); {
		case frames > 0:
			seen.Count++
		case err != nil:
			seen.Refusal = err.Error()
		}
	}
	if seen.Count == 0 {
		return seen, errors.New("not even one question was answered")
	}
	seen.Bound = burst + 1 + int(time.Since(began).Seconds()/2) // one in two seconds
	return seen, nil
}

// fetchRevoked asks for the records of a site of which one node is revoked.
func (f *Field) fetchRevoked(ctx context.Context) (seen Seen, err error) {
	if err := f.inSites(ctx); err != nil {
		return seen, err
	}
	p, err := f.siteOf(ctx, "going", "dc")
	if err != nil {
		return seen, err
	}
	record, err := signed(p, &skeinv1.Record{NodeId: p.id(), Epoch: 1, Seq: 1, Site: "dc",
		Scope: skeinv1.RecordScope_RECORD_SCOPE_SITE})
	if err != nil {
		return seen, err
	}
	has := func() (bool, error) {
		records, _, err := f.mallory.ask(ctx, relayNode, frameFetch)
		return slices.ContainsFunc(records, func(s *skeinv1.SignedRecord) bool { return proto.Equal(s, record) }), err
	}
	p.tunnel, p.ns = true, f.mallory.ns // the relay joins no streams to its own node
	if err := until(ctx, 2*patience, func() error {
		if _, err := p.pushAs(ctx, relayNode, frameHaveSite, record); err != nil {
			return err
		}
		pause.For(ctx, time.Second) // mallory may ask once in two seconds, after a burst of eight
		is, err := has()
		if err == nil && !is {
			err = errors.New("the site does not take in the record of its node")
		}
		return err
	}); err != nil {
		return seen, err
	}
	if _, err := f.api(relayNode).RevokeNode(ctx,
		&skeinv1.RevokeNodeRequest{Node: p.id(), Reason: "red team"}); err != nil {
		return seen, err
	}
	pause.For(ctx, 2*time.Second) // then mallory may ask once more
	is, err := has()
	if is {
		seen.Given = append(seen.Given, "the record of a node that was revoked")
	}
	return seen, err
}

// answered has the victim show the records of nodes for which it has to ask mallory, until it has asked and enough says
// that it has what it needs. longest is how long its user waited for one of them, at most.
func (f *Field) answered(ctx context.Context, serve func(net.Conn) error, enough func([]*skeinv1.Record) error,
	of ...*person) (out []*skeinv1.Record, longest time.Duration, err error) {
	i, err := f.impersonate(victim)
	if err != nil {
		return nil, 0, err
	}
	defer i.close()
	asked := make(chan struct{}, 16)
	i.gossip = func(c net.Conn) {
		var head [2]byte
		if _, err := c.Read(head[:]); err != nil || head[0] != recordMagic {
			return
		}
		if kind, _, err := readRecordFrame(c); err != nil || kind != frameFetch {
			return
		}
		select {
		case asked <- struct{}{}:
		default:
		}
		_ = serve(c)
	}
	if err := i.begin(); err != nil {
		return nil, 0, err
	}
	ping, err := f.lab.PingNode(victim, attacker, 200*time.Millisecond, 0) // a pair that talks goes by the tunnel
	if err != nil {
		return nil, 0, err
	}
	defer ping.Stop()
	has := false
	err = until(ctx, 6*patience, func() error {
		out = nil
		for _, p := range of {
			began := time.Now()
			r, err := f.recordAt(ctx, victim, p.node.GetId())
			if err != nil {
				return err
			}
			out, longest = append(out, r), max(longest, time.Since(began))
		}
		select {
		case <-asked:
			has = true
		default:
			if !has {
				return errors.New("the victim asks mallory for nothing")
			}
		}
		return enough(out)
	})
	return out, longest, err
}

// answers has mallory answer with another node's record, which is not what that node has signed. With it goes one that
// is genuine: when the victim does not show that, the attempt proves nothing.
func answers(name string, guard Guard,
	forge func(*Field, *skeinv1.SignedRecord, *skeinv1.Record) (*skeinv1.SignedRecord, error)) Attempt {
	return Attempt{Name: name, From: Member, Guard: guard,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if err := f.inSites(ctx); err != nil {
				return seen, err
			}
			var signedBy [2]*skeinv1.SignedRecord
			var people [2]*person
			for i, name := range []string{"forged", "genuine"} {
				p, err := f.siteOf(ctx, name, "evil")
				if err != nil {
					return seen, err
				}
				r := &skeinv1.Record{NodeId: p.id(), Epoch: 1, Seq: 1, Site: "evil", Version: "genuine",
					Scope: skeinv1.RecordScope_RECORD_SCOPE_SITE}
				people[i] = p
				if signedBy[i], err = signed(p, r); err != nil {
					return seen, err
				}
				if i == 0 {
					r.Epoch, r.Version = 2, forgedSite
					if signedBy[i], err = forge(f, signedBy[i], r); err != nil {
						return seen, err
					}
				}
			}
			seen.Records, _, err = f.answered(ctx, func(c net.Conn) error {
				if err := writeRecordFrame(c, frameRecordList, &skeinv1.Records{Records: signedBy[:]}); err != nil {
					return err
				}
				return writeRecordFrame(c, frameWant, &skeinv1.Digests{})
			}, func(shown []*skeinv1.Record) error {
				if shown[1].GetVersion() != "genuine" {
					return errors.New("the victim does not take mallory's answer")
				}
				return nil
			}, people[:]...)
			return seen, err
		}, Judge: shownForged}
}

// shownForged judges that a node shows as another's record what that one has not signed.
func shownForged(s Seen) string {
	if s.Records[0].GetVersion() == forgedSite {
		return "the victim shows a record that its node has not signed"
	}
	return ""
}

// endless has mallory answer with records without end, and looks how long the victim's user waits.
func (f *Field) endless(ctx context.Context) (seen Seen, err error) {
	if err := f.inSites(ctx); err != nil {
		return seen, err
	}
	p, err := f.siteOf(ctx, "endless", "evil")
	if err != nil {
		return seen, err
	}
	record, err := signed(p, &skeinv1.Record{NodeId: p.id(), Epoch: 1, Seq: 1, Site: "evil",
		Scope: skeinv1.RecordScope_RECORD_SCOPE_SITE, Labels: manyLabels(30, 200)})
	if err != nil {
		return seen, err
	}
	many := &skeinv1.Records{Records: slices.Repeat([]*skeinv1.SignedRecord{record}, 32)}
	_, longest, err := f.answered(ctx, func(c net.Conn) (err error) {
		for err == nil {
			err = writeRecordFrame(c, frameRecordList, many)
		}
		return err
	}, func([]*skeinv1.Record) error { return nil }, p)
	if longest > patience { // three seconds, and what the machine takes
		seen.Lost = append(seen.Lost, fmt.Sprintf("the victim's user waits %s", longest.Round(time.Second)))
	}
	seen.Refusal = fmt.Sprintf("the victim's user waits %s", longest.Round(100*time.Millisecond))
	return seen, err
}
