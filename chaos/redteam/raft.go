package redteam

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// raftLayer lets the library's own transport speak over a person's streams.
type raftLayer struct {
	p    *person
	done chan struct{}
}

func (l raftLayer) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	id, err := identity.ParseID(string(address))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), max(timeout, time.Second))
	defer cancel()
	return l.p.Dial(ctx, id, identity.ALPNRaft)
}
func (l raftLayer) Accept() (net.Conn, error) { <-l.done; return nil, net.ErrClosed }
func (l raftLayer) Close() error              { close(l.done); return nil }
func (l raftLayer) Addr() net.Addr            { return &net.TCPAddr{} }

// onRaft sends one Raft message to each server, and looks at what the servers show before and after.
func onRaft(name string, judge func(Seen) string,
	send func(f *Field, t *raft.NetworkTransport, head raft.RPCHeader, to raft.ServerID, at raft.ServerAddress,
		state *skeinv1.State) (string, error)) Attempt {
	return Attempt{Name: name, From: Member, Guard: RaftStreams, Judge: judge,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if seen.Before, err = f.log(ctx); err != nil {
				return seen, err
			}
			leader, err := f.leader(ctx)
			if err != nil {
				return seen, err
			}
			t := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
				Stream: raftLayer{f.mallory, make(chan struct{})}, MaxPool: 1, Timeout: 2 * time.Second,
				MsgpackUseNewTimeFormat: true, MaxRPCsInFlight: 1, Logger: hclog.New(&hclog.LoggerOptions{Output: io.Discard})})
			defer t.Close()
			head := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(f.mallory.id()),
				Addr: []byte(f.mallory.id())}
			for _, s := range []string{"dc1", "dc2", "dc3"} {
				id := f.id(s).String()
				got, err := send(f, t, head, raft.ServerID(id), raft.ServerAddress(id), seen.Before)
				if err != nil {
					seen.Refusal = err.Error()
				}
				if got != "" {
					seen.Given = append(seen.Given, s+" "+got)
				}
			}
			pause.For(ctx, 2*time.Second)
			if seen.After, err = f.log(ctx); err != nil {
				return seen, err
			}
			if now, err := f.leader(ctx); err != nil {
				seen.Lost = append(seen.Lost, "nobody leads any more")
			} else if now != leader {
				seen.Lost = append(seen.Lost, fmt.Sprintf("%s leads no more", leader))
			}
			return seen, nil
		}}
}

// disturbed judges by the log and by who leads; that a server answered a Raft message at all is a gain, too.
func disturbed(s Seen) string {
	if g := changed("a node is revoked by a forged entry", revokedOf)(s); g != "" {
		return g
	}
	if s.After.GetIndex() < s.Before.GetIndex() {
		return "the log went back"
	}
	if l := lost(s); l != "" {
		return l
	}
	return given(s)
}

func memberRaft() []Attempt {
	const ahead = 1 << 20 // terms
	return []Attempt{
		onRaft("ask for votes with a higher term", disturbed,
			func(f *Field, t *raft.NetworkTransport, head raft.RPCHeader, to raft.ServerID, at raft.ServerAddress,
				state *skeinv1.State) (string, error) {
				r := &raft.RequestVoteResponse{}
				err := t.RequestVote(to, at, &raft.RequestVoteRequest{RPCHeader: head, Term: ahead, LastLogIndex: 1 << 40,
					LastLogTerm: ahead, LeadershipTransfer: true}, r)
				if err == nil {
					return fmt.Sprintf("answers: granted %v, term %d", r.Granted, r.Term), nil
				}
				return "", err
			}),
		onRaft("have a server start an election", disturbed,
			func(f *Field, t *raft.NetworkTransport, head raft.RPCHeader, to raft.ServerID, at raft.ServerAddress,
				state *skeinv1.State) (string, error) {
				r := &raft.TimeoutNowResponse{}
				if err := t.TimeoutNow(to, at, &raft.TimeoutNowRequest{RPCHeader: head}, r); err != nil {
					return "", err
				}
				return "obeys", nil
			}),
		onRaft("install a snapshot of its own", disturbed,
			func(f *Field, t *raft.NetworkTransport, head raft.RPCHeader, to raft.ServerID, at raft.ServerAddress,
				state *skeinv1.State) (string, error) {
				r := &raft.InstallSnapshotResponse{}
				err := t.InstallSnapshot(to, at, &raft.InstallSnapshotRequest{RPCHeader: head, SnapshotVersion: 1, Term: 1,
					Leader: head.Addr, LastLogIndex: 1 << 40, LastLogTerm: 1}, r, empty{})
				if err == nil {
					return fmt.Sprintf("answers: success %v", r.Success), nil
				}
				return "", err
			}),
		onRaft("append an entry that revokes a node, at a higher term", disturbed,
			func(f *Field, t *raft.NetworkTransport, head raft.RPCHeader, to raft.ServerID, at raft.ServerAddress,
				state *skeinv1.State) (string, error) {
				return forgeEntry(f, t, head, to, at, state, 2*ahead)
			}),
	}
}

type empty struct{}

func (empty) Read([]byte) (int, error) { return 0, io.EOF }

// forgeEntry asks where the server's log ends, as a leader would, and appends a revocation of the prey behind it.
func forgeEntry(f *Field, t *raft.NetworkTransport, head raft.RPCHeader, to raft.ServerID, at raft.ServerAddress,
	state *skeinv1.State, term uint64) (string, error) {
	data, err := consensus.EncodeBatch(&skeinv1.Batch{Base: state.GetIndex(),
		Events: []*skeinv1.Event{{Index: state.GetIndex() + 1, Time: state.GetTime(), Schema: 1,
			Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: f.prey.id(), Reason: "forged"}}}}})
	if err != nil {
		return "", err
	}
	r := &raft.AppendEntriesResponse{}
	probe := &raft.AppendEntriesRequest{RPCHeader: head, Term: term, PrevLogEntry: 1 << 40, PrevLogTerm: term}
	if err := t.AppendEntries(to, at, probe, r); err != nil {
		return "", err
	}
	last := r.LastLog
	// The term of the last entry is a small number; the right one is tried out.
	for guess := uint64(1); guess < 200; guess++ {
		q := &raft.AppendEntriesRequest{RPCHeader: head, Term: term, PrevLogEntry: last, PrevLogTerm: guess,
			Entries: []*raft.Log{{Index: last + 1, Term: term, Type: raft.LogCommand, Data: data}}, LeaderCommitIndex: last + 1}
		r = &raft.AppendEntriesResponse{}
		if err := t.AppendEntries(to, at, q, r); err != nil {
			return "", errors.Join(errors.New("after the first answer"), err)
		}
		if r.Success {
			return "appends the entry", nil
		}
	}
	return "answers, and appends nothing", nil
}
