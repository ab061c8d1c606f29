package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"rsc.io/qr"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func (f *fakeAgent) AddPlainPeer(_ context.Context, r *skeinv1.AddPlainPeerRequest) (*skeinv1.AddPlainPeerResponse,
	error) {
	return answerTo[*skeinv1.AddPlainPeerResponse](f, r)
}

func (f *fakeAgent) PlainPeers(_ context.Context, r *skeinv1.PlainPeersRequest) (*skeinv1.PlainPeersResponse, error) {
	return answerTo[*skeinv1.PlainPeersResponse](f, r)
}

func (f *fakeAgent) RemovePlainPeer(_ context.Context,
	r *skeinv1.RemovePlainPeerRequest) (*skeinv1.RemovePlainPeerResponse, error) {
	return answerTo[*skeinv1.RemovePlainPeerResponse](f, r)
}

func bytes32(b byte) []byte { return slices.Repeat([]byte{b}, 32) }

var addedPeer = &skeinv1.AddPlainPeerResponse{
	Peer: &skeinv1.PlainPeer{Name: "office", PublicKey: bytes32(1), CarrierKey: bytes32(2), Ipv4: "10.4.255.254",
		Ipv6: "fd01::7", AllowedIps: []string{"192.168.8.0/24"}, ExpiresAt: 1795269600e9},
	Index: 31, PresharedKey: bytes32(3), Routes: []string{"10.4.0.0/16", "fd01::/64"},
	Endpoints: []*skeinv1.PlainEndpoint{{NodeId: "b33ad742981917ca", Node: "gw1", WireguardKey: bytes32(4),
		Address: "198.51.100.7:51821"},
		{NodeId: "7ef4fee4c02da850", Node: "gw2", WireguardKey: bytes32(5), Address: "[2001:db8::9]:51821"}},
}

// The configuration is printed as it is: with a gap for a private key that the peer has made, whole when it was made
// here.
func TestPeerIsAdded(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.AddPlainPeerRequest{}, addedPeer)
	public := base64.StdEncoding.EncodeToString(bytes32(1))
	f.showsGolden(t, "peer-add", []string{"peer", "add", "office", "--public-key", public, "--allowed-ips",
		"192.168.8.0/24,192.168.9.1", "--via", "gw1,gw2", "--expires", "24h", "--replace"})
	want := &skeinv1.AddPlainPeerRequest{Name: "office", PublicKey: bytes32(1), AllowedIps: []string{"192.168.8.0/24",
		"192.168.9.1/32"}, Via: []string{"gw1", "gw2"}, LifetimeNanos: int64(24 * time.Hour), Replace: true}
	if !proto.Equal(f.asked[0], want) {
		t.Errorf("asked for %v", f.asked[0])
	}

	out, _, err := f.skein(t, "peer", "add", "office", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var said struct {
		Peer          struct{ Name string }
		Configuration string
		Warnings      []string
	}
	if err := json.Unmarshal([]byte(out), &said); err != nil || said.Peer.Name != "office" || said.Warnings == nil {
		t.Fatalf("%v: %s", err, out)
	}
	asked := f.asked[1].(*skeinv1.AddPlainPeerRequest)
	_, after, _ := strings.Cut(said.Configuration, "PrivateKey = ")
	text, _, _ := strings.Cut(after, "\n")
	private, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(private) != 32 {
		t.Fatalf("the private key is %q", text)
	}
	if pub, err := identity.WireGuardKey(private).Public(); err != nil ||
		string(pub[:]) != string(asked.GetPublicKey()) {
		t.Error("the private key that is printed is another than the one whose public half was sent")
	}
	b, err := proto.Marshal(asked)
	if err != nil || strings.Contains(string(b), string(private)) {
		t.Error("the private key was sent")
	}
}

func TestPeerIsAddedWrongly(t *testing.T) {
	f := newFakeAgent(t)
	for args, want := range map[string]string{
		"peer add":                     "one name",
		"peer add x --public-key abc":  "is not a WireGuard key",
		"peer add x --public-key QUJD": "is not a WireGuard key",
		"peer add x --expires -1h":     "want a time from now",
		"peer add x --expires 0s":      "want a time from now",
		"peer add x --qr sometimes":    "allowed: auto, always, never",
		"peer remove":                  "one plain peer's name",
		"peer list x":                  "unknown command or argument",
	} {
		if _, _, err := f.skein(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("skein %s: %v, want %q", args, err, want)
		}
	}
	if len(f.asked) > 0 {
		t.Errorf("the agent was asked for %v", f.asked)
	}
}

// The QR code is of square modules, dark on light, with the configuration and without its comments.
func TestPeerQRCode(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.AddPlainPeerRequest{}, addedPeer)
	out, _, err := f.skein(t, "peer", "add", "office", "--qr", "always")
	if err != nil {
		t.Fatal(err)
	}
	text, drawn, ok := strings.Cut(out, "\n\n█")
	if !ok {
		t.Fatalf("no code is drawn:\n%s", out)
	}
	var lines []string
	for line := range strings.Lines(text + "\n") {
		if !strings.HasPrefix(line, "#") && line != "\n" {
			lines = append(lines, line)
		}
	}
	code, err := qr.Encode(strings.Join(lines, ""), qr.L)
	if err != nil {
		t.Fatal(err)
	}
	rows := strings.Split(strings.TrimSuffix("█"+drawn, "\n"), "\n")
	if len(rows) != (code.Size+5)/2 {
		t.Fatalf("%d lines for %d modules", len(rows), code.Size)
	}
	for y, row := range rows {
		for x, c := range []rune(row) {
			upper, lower := c == '█' || c == '▀', c == '█' || c == '▄'
			if upper == code.Black(x-2, 2*y-2) || lower == code.Black(x-2, 2*y-1) && 2*y-1 < code.Size+2 {
				t.Fatalf("line %d, column %d is %c", y, x, c)
			}
		}
	}
}

func TestPeersAreListed(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.PlainPeersRequest{}, &skeinv1.PlainPeersResponse{})
	f.showsGolden(t, "peer-list-empty", []string{"peer", "list"})
	views := []*skeinv1.PlainPeerView{
		{Peer: addedPeer.GetPeer(), Holder: "b33ad742981917ca", HolderName: "gw1", Alive: true,
			Carriers: []string{"gw1", "gw2"}},
		{Peer: &skeinv1.PlainPeer{Name: "phone", Ipv4: "10.4.255.253", Ipv6: "fd01::8"}, Holder: "7ef4fee4c02da850",
			HolderName: "gw2", Carriers: []string{"gw2", "0123456789abcdef"},
			Problem: "carrier 0123456789abcdef is not a member any more and still knows the peer's secrets: give it new ones " +
				"with skein peer add phone --replace"},
		{Peer: &skeinv1.PlainPeer{Name: "tablet", Ipv4: "10.4.255.252", Ipv6: "fd01::9"}, Carriers: []string{"gw1"}},
	}
	views[0].Peer = proto.CloneOf(views[0].Peer)
	views[0].Peer.ExpiresAt = 1
	f.lay(&skeinv1.PlainPeersRequest{}, &skeinv1.PlainPeersResponse{Peers: views})
	f.lay(&skeinv1.RemovePlainPeerRequest{}, &skeinv1.RemovePlainPeerResponse{Index: 44})
	f.showsGolden(t, "peer-list", []string{"peer", "list"}, []string{"peer", "remove", "phone"})
}

// Status names the plain peers that a node carries, the first few of them.
func TestStatusNamesCarriedPeers(t *testing.T) {
	now := time.Unix(1e6, 0)
	for want, v := range map[string]*skeinv1.PlainPeerView{
		"plain peer phone, last handshake 12s ago": {LastHandshake: now.Add(-12 * time.Second).UnixNano()},
		"plain peer phone, no handshake yet": {Peer: &skeinv1.PlainPeer{ExpiresAt: now.Add(
			25 * time.Hour).UnixNano()}},
		"plain peer phone, no handshake yet, expires in 23h30m": {Peer: &skeinv1.PlainPeer{ExpiresAt: now.Add(
			23*time.Hour + 30*time.Minute).UnixNano()}},
		"plain peer phone, last handshake 3m20s ago, expired": {LastHandshake: now.Add(-200 * time.Second).UnixNano(),
			Peer: &skeinv1.PlainPeer{ExpiresAt: now.UnixNano()}},
		"plain peer phone, last handshake 2m0s ago, expires in 5s": {LastHandshake: now.Add(-2 * time.Minute).UnixNano(),
			Peer: &skeinv1.PlainPeer{ExpiresAt: now.Add(5 * time.Second).UnixNano()}},
	} {
		if v.Peer == nil {
			v.Peer = &skeinv1.PlainPeer{}
		}
		v.Peer.Name = "phone"
		if have := carriesText(v, now); have != want {
			t.Errorf("%q, want %q", have, want)
		}
	}
	var b strings.Builder
	s := &skeinv1.StatusResponse{}
	for range 7 {
		s.Carries = append(s.Carries, &skeinv1.PlainPeerView{Peer: &skeinv1.PlainPeer{Name: "phone"}})
	}
	printStatus(&b, s)
	if strings.Count(b.String(), "carries    plain peer phone") != 5 ||
		!strings.Contains(b.String(), "carries    2 more; skein peer list") {
		t.Error(b.String())
	}
}
