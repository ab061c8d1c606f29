package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func (f *fakeAgent) RotateGossipKey(_ context.Context,
	r *skeinv1.RotateGossipKeyRequest) (*skeinv1.RotateGossipKeyResponse, error) {
	return answerTo[*skeinv1.RotateGossipKeyResponse](f, r)
}

func TestRotateGossipKey(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.RotateGossipKeyRequest{}, &skeinv1.RotateGossipKeyResponse{Index: 41, Keys: &skeinv1.GossipKeysView{
		Agreed: "0a1b2c3d", Accepted: []string{"4e5f6071", "8293a4b5"}, Used: "4e5f6071"}})
	out, _, err := f.skein(t, "cluster", "rotate", "gossip-key")
	if want := "gossip key 0a1b2c3d is agreed and used in a moment, until then 4e5f6071; still read: 4e5f6071 8293a4b5, " +
		"as of event 41\n"; err != nil || out != want {
		t.Errorf("it says %q (%v), want %q", out, err, want)
	}
	asked := len(f.asked)
	for _, args := range [][]string{{"cluster", "rotate", "gossip-key", "now"}, {"cluster", "rotate", "wireguard"}} {
		if _, _, err := f.skein(t, args...); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
	if len(f.asked) != asked {
		t.Errorf("wrong commands ask %v", f.asked[asked:])
	}
	var b bytes.Buffer
	printStatus(&b, &skeinv1.StatusResponse{GossipKeys: &skeinv1.GossipKeysView{Agreed: "0a1b2c3d", Used: "0a1b2c3d"}})
	if !strings.Contains(b.String(), "gossip key 0a1b2c3d is agreed and used\n") {
		t.Errorf("status says\n%s", b.String())
	}
}

func (f *fakeAgent) RotateNodeKey(_ context.Context, r *skeinv1.RotateNodeKeyRequest) (*skeinv1.RotateNodeKeyResponse,
	error) {
	return answerTo[*skeinv1.RotateNodeKeyResponse](f, r)
}

func TestRotateNodeKey(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.RotateNodeKeyRequest{}, &skeinv1.RotateNodeKeyResponse{
		WireguardKey: []byte("0123456789abcdef0123456789abcdef"), Index: 41, Ready: 3, Late: []string{"home1", "home2"},
		TookNanos: 12_345_678})
	out, _, err := f.skein(t, "node", "rotate-key")
	if want := "WireGuard key MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=, as of event 41\npeers that were ready: 3; " +
		"agreed 12ms after the change\nnot ready, and cut off for some seconds: home1, home2\n"; err != nil || out != want {
		t.Errorf("it says %q (%v), want %q", out, err, want)
	}
	if _, _, err := f.skein(t, "node", "rotate-key", "home1"); err == nil {
		t.Error("it changes another host's key")
	}
}
