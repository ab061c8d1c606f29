package redteam

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// strayFiles are files below the lab's directory, or in /tmp, that a name with ../ would make.
func (f *Field) strayFiles() (out []string, err error) {
	for _, where := range []string{"/tmp/x", "/tmp/x.new", filepath.Dir(f.lab.Dir) + "/x"} {
		m, err := filepath.Glob(where + "*")
		if err != nil {
			return out, err
		}
		for _, x := range m {
			if b := filepath.Base(x); b == "x" || strings.HasPrefix(b, "x.") || strings.HasPrefix(b, "x-") {
				out = append(out, x)
			}
		}
	}
	err = filepath.WalkDir(f.lab.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(filepath.Base(path), "redteam-path") {
			out = append(out, path)
		}
		return nil // a file that has gone meanwhile is none
	})
	return out, err
}

// admin asks a server's own API, as whoever holds the role of an admin may.
func admin(name string, guard Guard, ask func(context.Context, *Field) error) Attempt {
	return Attempt{Name: name, From: Member, Guard: guard,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if seen.Before, err = f.log(ctx); err != nil {
				return seen, err
			}
			if err := ask(ctx, f); err != nil {
				seen.Refusal = err.Error()
			}
			pause.For(ctx, 200*time.Millisecond)
			if seen.After, err = f.log(ctx); err != nil {
				return seen, err
			}
			for _, p := range seen.After.GetPools() { // the next attempts want the lab as it was
				if !slices.ContainsFunc(seen.Before.GetPools(), func(b *skeinv1.Pool) bool { return b.GetName() == p.GetName() }) {
					if _, err := f.api(relayNode).RemovePool(ctx, &skeinv1.RemovePoolRequest{Name: p.GetName()}); err != nil {
						return seen, err
					}
				}
			}
			seen.Files, err = f.strayFiles()
			return seen, err
		}, Judge: func(s Seen) string {
			if len(s.Files) > 0 {
				return "a file at " + s.Files[0]
			}
			if proto.Equal(egressesOf(s.Before), egressesOf(s.After)) && proto.Equal(poolsOf(s.Before), poolsOf(s.After)) &&
				proto.Equal(nodesOf(s.Before), nodesOf(s.After)) && proto.Equal(tokensOf(s.Before), tokensOf(s.After)) {
				return ""
			}
			return "the log has taken it in"
		}}
}

func sizes() []Attempt {
	path := "../../../../tmp/x"
	return []Attempt{
		admin("an admin defines an egress that is called like a path", Names, func(ctx context.Context, f *Field) error {
			_, err := f.api(relayNode).CreateEgress(ctx, &skeinv1.CreateEgressRequest{Egress: &skeinv1.Egress{Namespace: "out",
				Name: path, Destinations: []string{"203.0.113.0/24"}, Gateways: map[string]string{"gateway": "yes"}, Replicas: 1}})
			return err
		}),
		admin("an admin defines an egress in a namespace that is called like a path", Names,
			func(ctx context.Context, f *Field) error {
				_, err := f.api(relayNode).CreateEgress(ctx, &skeinv1.CreateEgressRequest{Egress: &skeinv1.Egress{Namespace: path,
					Name: "x", Destinations: []string{"203.0.113.0/24"}, Gateways: map[string]string{"gateway": "yes"},
					Replicas: 1}})
				return err
			}),
		admin("an admin makes an egress that every node is a gateway of", Names, func(ctx context.Context, f *Field) error {
			_, err := f.api(relayNode).CreateEgress(ctx, &skeinv1.CreateEgressRequest{Egress: &skeinv1.Egress{Namespace: "out",
				Name: "all", Destinations: []string{"203.0.113.0/24"}, Replicas: 1}})
			return err
		}),
		admin("an admin makes a pool that is called like a path", Names, func(ctx context.Context, f *Field) error {
			_, err := f.api(relayNode).CreatePool(ctx, &skeinv1.CreatePoolRequest{Pool: &skeinv1.Pool{Name: path,
				BlockSizeBits: 2, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.97.0.0/24"}}}})
			return err
		}),
		admin("an admin makes a token with a label of 64 KiB", Limits, func(ctx context.Context, f *Field) error {
			_, err := f.api(relayNode).CreateToken(ctx,
				&skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(time.Hour), Label: strings.Repeat("x", 64<<10)})
			return err
		}),
		command("rename itself to a path", Names, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: f.mallory.id(),
				Name: path}}}
		}, changed("a node is called like a path", nodesOf)),
		command("give itself 64 KiB of labels", Limits, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: f.mallory.id(),
				SetLabels: true, Labels: manyLabels(1000, 60)}}}
		}, changed("labels without a limit", nodesOf)),
		command("use a request ID of 64 KiB", Limits, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{RequestId: strings.Repeat("r", 64<<10),
				Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: f.mallory.id(),
					Pool: "default", Total: 2}}}
		}, func(s Seen) string {
			for _, a := range s.After.GetAnswers() {
				if len(a.GetRequestId()) > 4<<10 {
					return "the state keeps a request ID of " + plural(len(a.GetRequestId())) + " bytes"
				}
			}
			return ""
		}),
		command("propose nothing at all", Limits, func(*Field) *skeinv1.Command { return &skeinv1.Command{} },
			changed("the log has taken it in", nodesOf)),
		body("send a command of 12 MiB", func(*Field) []byte {
			c := &skeinv1.ProposeRequest{Command: &skeinv1.Command{RequestId: consensus.NewRequestID(),
				Issuer: strings.Repeat("x", 12<<20)}}
			b, _ := proto.Marshal(c)
			return b
		}),
		body("send messages nested 100,000 deep", func(*Field) []byte {
			var b []byte
			for range 100_000 {
				b = protowire.AppendTag(b, 9999, protowire.StartGroupType)
			}
			return b
		}),
		body("send half a message", func(*Field) []byte { return []byte{0x0a, 0xff, 0xff, 0xff, 0x7f} }),
		{Name: "announce a gossip frame of 4 GiB", From: Member, Guard: Limits,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				c, err := f.mallory.Dial(ctx, f.id(relayNode), identity.ALPNGossip)
				if err != nil {
					return seen, err
				}
				defer c.Close()
				_, _ = c.Write([]byte{recordMagic, recordVersion, frameRecordList, 0xff, 0xff, 0xff, 0xff})
				_, _ = c.Write(make([]byte, 64<<10))
				seen.waits(c, "a frame of 4 GiB")
				return seen, nil
			}, Judge: lost},
	}
}

// waits notes as lost to others that a server goes on reading what is announced to be too large. One that refuses it
// ends the stream at once; one that waits keeps the stream, and what has come, until the stream's own end, after 10 s.
// It returns what the server has said.
func (s *Seen) waits(c net.Conn, what string) []byte {
	b, err := heard(c, 2*time.Second)
	if isTimeout(err) {
		s.Lost = append(s.Lost, "the server goes on reading "+what)
	} else if err != nil {
		s.Refusal = err.Error()
	}
	return b
}

// body posts bytes to Propose of a server. Whether the server still runs is looked at after each attempt.
func body(name string, make func(*Field) []byte) Attempt {
	return Attempt{Name: name, From: Member, Guard: Limits,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if seen.Before, err = f.log(ctx); err != nil {
				return seen, err
			}
			b := make(f)
			r, err := http.NewRequestWithContext(ctx, http.MethodPost,
				consensus.URL(f.id(relayNode))+"/skein.v1.ClusterService/Propose", bytes.NewReader(b))
			if err != nil {
				return seen, err
			}
			r.Header.Set("Content-Type", "application/proto")
			answer, err := f.mallory.conns.HTTP().Do(r)
			if err != nil {
				seen.Refusal = err.Error()
			} else {
				text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<12))
				answer.Body.Close()
				seen.Refusal = fmt.Sprintf("%s: %s", answer.Status, text)
			}
			seen.After, err = f.log(ctx)
			return seen, err
		}, Judge: func(s Seen) string { return changed("the log has taken it in", nodesOf)(s) }}
}

// plural writes a number with separators of thousands.
func plural(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
