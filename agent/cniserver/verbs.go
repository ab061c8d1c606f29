package cniserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/skeinmesh/skein/agent/egress/clients"
	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Add gives an attachment addresses and a link.
func (s *Server) Add(ctx context.Context, r *skeinv1.CNIAddRequest) (*skeinv1.CNIAddResponse, error) {
	var out *skeinv1.CNIAddResponse
	err := s.answer(ctx, "ADD", r.GetAttachment(), func(ctx context.Context, key podnet.Key) (err error) {
		out, err = s.add(ctx, key, r)
		return err
	})
	return out, err
}

// awaitReady has a pod that starts with the agent wait, not fail.
func (s *Server) awaitReady(ctx context.Context) {
	if s.cfg.Ready == nil {
		return
	}
	timer := time.NewTimer(readyPatience)
	defer timer.Stop()
	select {
	case <-s.cfg.Ready:
	case <-timer.C:
	case <-ctx.Done():
	}
}

func (s *Server) add(ctx context.Context, key podnet.Key, r *skeinv1.CNIAddRequest) (*skeinv1.CNIAddResponse, error) {
	s.awaitReady(ctx)
	if err := judge(s.cfg.Condition(ctx), rights(), nil); refusedWith(err) == cni.CodeUnavailable {
		return nil, err // older runtimes do not ask for STATUS
	}
	req := ipam.Request{Network: r.GetNetwork(), Pool: r.GetPool(), Attachment: podnet.Attachment{Key: key,
		NetNS: r.GetNetns(), Namespace: r.GetNamespace(), Pod: r.GetPod()}}
	for _, text := range r.GetIps() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, refuse(cni.CodeConfig, fmt.Sprintf("%.100q is not an address", text), "ask for one IPv4 and one IPv6 "+
				"address at most")
		}
		req.Addresses = append(req.Addresses, a)
	}
	annotations := r.GetAnnotations()
	if s.cfg.Facts != nil {
		f, err := s.cfg.Facts(ctx, r.GetNamespace(), r.GetPod())
		if err != nil {
			return nil, refuse(cni.CodeTryAgain, err.Error(), "see `skein status` for what is wrong between this host and the "+
				"apiserver; the runtime may try again")
		}
		req.NamespacePool = f.Pool
		if f.Annotations != nil { // newer than what the runtime has
			annotations = f.Annotations
		}
	}
	if err := s.vacant(ctx, key, r.GetNetns()); err != nil {
		return nil, err
	}
	lease, err := s.cfg.Allocator.Assign(ctx, req)
	if err != nil {
		return nil, err
	}
	mtu := r.GetMtu()
	if mtu == 0 {
		mtu = s.cfg.MTU()
	}
	at := lease.Attachment
	at.MTU = int(mtu)
	var link podnet.Link
	made := false
	err = s.kernel(ctx, func() (err error) {
		link, err = s.cfg.Network.Add(at)
		made = err == nil
		return err
	})
	if err == nil && s.cfg.Egresses != nil && len(annotations) > 0 {
		s.useEgresses(ctx, lease, link, annotations)
	}
	if err == nil {
		err = ctx.Err() // nobody is there any more who would ever ask for a DEL
	}
	if err != nil {
		return nil, s.undo(ctx, lease, made, err)
	}
	out := &skeinv1.CNIAddResponse{HostInterface: link.Host, HostMac: link.HostMAC.String(), Mac: link.MAC.String(),
		Mtu: mtu, Pool: lease.Pool}
	if lease.IPv4.IsValid() {
		out.Ipv4, out.Gateway4 = lease.IPv4.String(), dataplane.PodGateway
	}
	if lease.IPv6.IsValid() && link.Gateway6.IsValid() { // not where IPv6 is disabled
		out.Ipv6, out.Gateway6 = lease.IPv6.String(), link.Gateway6.String()
	}
	return out, nil
}

// refusedWith is what the specification calls an error that is ours.
func refusedWith(err error) uint32 {
	if refused := (*types.Error)(nil); errors.As(err, &refused) {
		return uint32(refused.Code)
	}
	return 0
}

// useEgresses has a pod use the egresses of its annotations. What does not work is told there, and the pod runs.
func (s *Server) useEgresses(ctx context.Context, l ipam.Lease, link podnet.Link, annotations map[string]string) {
	p := l.Attachment
	if !link.Gateway6.IsValid() { // IPv6 is disabled
		p.IPv6 = netip.Addr{}
	}
	for _, e := range s.cfg.Egresses.AddPod(ctx, p, annotations) {
		if e.GetState() != clients.Ready {
			s.cfg.Log.Warn("an egress of a pod is not ready", "pod", l.Namespace+"/"+l.Pod, "egress", e.GetNamespace()+"/"+
				e.GetName(), "state", e.GetState(), "reason", e.GetReason())
		}
	}
}

// LinkOf is the name of the host's end of a pod's link; empty for a link that is neither ours nor Coil's.
func LinkOf(l ipam.Lease) string {
	switch {
	case l.Link != "":
		return l.Link
	case l.Key.ContainerID == "":
		return ""
	}
	return podnet.HostLink(l.Key)
}

// leaveEgresses ends what useEgresses made.
func (s *Server) leaveEgresses(ctx context.Context, key podnet.Key) {
	if s.cfg.Egresses != nil {
		s.cfg.Egresses.DelPod(ctx, key)
	}
}

// vacant makes sure that an attachment can be made: the namespace is one, and what an earlier ADD left is out of the
// way.
func (s *Server) vacant(ctx context.Context, key podnet.Key, netns string) error {
	if s.cfg.NoteDir != "" && cni.HasNote(s.cfg.NoteDir, key) {
		if err := s.remove(ctx, key, "", deletedAway); err != nil {
			return err
		}
	}
	var there bool
	err := s.kernel(ctx, func() (err error) {
		if err = s.cfg.Network.CheckNetNS(netns); err != nil {
			return netNSError(netns, err)
		}
		there, err = s.cfg.Network.Has(key)
		return err
	})
	if err != nil {
		return err
	}
	old, leased := s.cfg.Allocator.Lookup(key)
	switch {
	case there:
		return refuse(cni.CodeExists, fmt.Sprintf("%s of container %s exists already%s", key.Interface, key.ContainerID,
			addressesOf(old)), "DEL must come before another ADD for the same container and interface")
	case leased: // its link is gone, and with it whoever used the address: a restart, or somebody removed the namespace
		s.cfg.Log.Info("an attachment without a link is replaced", "container", key.ContainerID, "interface", key.Interface,
			"ipv4", old.IPv4, "ipv6", old.IPv6)
		s.cfg.Allocator.Release(key, "its link is gone, and it was added again")
	}
	return nil
}

// netNSError says what is wrong with a namespace's path.
func netNSError(path string, err error) error {
	if _, serr := os.Stat(path); errors.Is(serr, fs.ErrNotExist) {
		return refuse(cni.CodeUnknown, fmt.Sprintf("CNI_NETNS %.300s: the network namespace is not there", path),
			"the container has ended, or the agent does not see the directory: it must share the host's /run/netns and /proc")
	}
	return refuse(cni.CodeEnvironment, fmt.Sprintf("CNI_NETNS %.300s: %v", path, err), "the runtime must pass the path "+
		"of the container's network namespace")
}

func addressesOf(l ipam.Lease) string {
	text := ""
	for _, a := range []netip.Addr{l.IPv4, l.IPv6} {
		if a.IsValid() {
			text += ", with " + a.String()
		}
	}
	return text
}

// undo takes back what an ADD has made before it failed with cause, also when its caller is gone. podnet.Add has
// cleared up after itself when it failed, and the interface of that name may then be somebody else's.
func (s *Server) undo(ctx context.Context, l ipam.Lease, made bool, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	reason := ipam.AddFailed
	if made {
		reason = "the ADD was given up"
		s.leaveEgresses(ctx, l.Key)
		if err := s.kernel(ctx, func() error {
			return s.cfg.Network.Del(l.NetNS, l.Key)
		}); err != nil {
			return errors.Join(cause, fmt.Errorf("undo: %w", err)) // the address stays with the link
		}
	}
	s.cfg.Allocator.Release(l.Key, reason)
	return cause
}

// remove takes link, addresses and note away; whatever of it is there. The addresses go after the link.
func (s *Server) remove(ctx context.Context, key podnet.Key, netns, reason string) error {
	if netns == "" {
		l, _ := s.cfg.Allocator.Lookup(key)
		netns = l.NetNS
	}
	s.leaveEgresses(ctx, key)
	if err := s.kernel(ctx, func() error { return s.cfg.Network.Del(netns, key) }); err != nil {
		return fmt.Errorf("remove %s of %s: %w", key.Interface, key.ContainerID, err)
	}
	s.cfg.Allocator.Release(key, reason)
	if s.cfg.NoteDir == "" {
		return nil
	}
	return cni.RemoveNote(s.cfg.NoteDir, key)
}

// Del takes back what an attachment has.
func (s *Server) Del(ctx context.Context, r *skeinv1.CNIDelRequest) (*skeinv1.CNIDelResponse, error) {
	return &skeinv1.CNIDelResponse{}, s.answer(ctx, "DEL", r.GetAttachment(),
		func(ctx context.Context, key podnet.Key) error {
			return s.remove(ctx, key, r.GetNetns(), "CNI DEL")
		})
}

// Check holds an attachment against what Add made.
func (s *Server) Check(ctx context.Context, r *skeinv1.CNICheckRequest) (*skeinv1.CNICheckResponse, error) {
	return &skeinv1.CNICheckResponse{}, s.answer(ctx, "CHECK", r.GetAttachment(),
		func(ctx context.Context, key podnet.Key) error {
			return s.check(ctx, key, r)
		})
}

func (s *Server) check(ctx context.Context, key podnet.Key, r *skeinv1.CNICheckRequest) error {
	lease, ok := s.cfg.Allocator.Lookup(key)
	if !ok {
		return refuse(cni.CodeUnknown, fmt.Sprintf("%s of container %s has no addresses here", key.Interface,
			key.ContainerID), "it was never added on this node, or was removed since: the runtime must make the container again")
	}
	var have []string
	for _, a := range []netip.Addr{lease.IPv4, lease.IPv6} {
		if a.IsValid() {
			have = append(have, a.String())
		}
	}
	for _, text := range r.GetIps() {
		a, err := netip.ParseAddr(text)
		if err != nil || !slices.Contains(have, a.Unmap().String()) {
			return refuse(cni.CodeChanged, fmt.Sprintf("address %.100s of %s of container %s is not reserved for it; "+
				"reserved: %v", text, key.Interface, key.ContainerID, have), "the runtime must make the container again")
		}
	}
	if len(r.GetIps()) == 0 {
		return refuse(cni.CodeConfig, fmt.Sprintf("prevResult has no address for %s, reserved are %v", key.Interface, have),
			"the runtime must pass the result of the ADD")
	}
	lease.NetNS = r.GetNetns()
	err := s.kernel(ctx, func() error {
		if err := s.cfg.Network.CheckNetNS(lease.NetNS); err != nil {
			return netNSError(lease.NetNS, err)
		}
		// the mesh's MTU may have changed since; that hurts nobody
		if err := s.cfg.Network.Check(lease.Attachment); err != nil {
			return refuse(cni.CodeChanged, err.Error(), "something else has changed the container's network: the runtime must "+
				"make the container again")
		}
		if s.cfg.Egresses == nil {
			return nil
		}
		if err := s.cfg.Egresses.CheckPod(key); err != nil {
			return refuse(cni.CodeChanged, err.Error(), "the agent repairs it within a second unless something changes it "+
				"again and again: see `skein egress show`")
		}
		return nil
	})
	return err
}

// GC takes back every attachment of a network configuration that is not listed, or without a list those that are surely
// gone. What cannot be removed is told, after all the others were.
func (s *Server) GC(ctx context.Context, r *skeinv1.CNIGCRequest) (*skeinv1.CNIGCResponse, error) {
	began := time.Now()
	if err := s.ReadNotes(ctx); err != nil {
		s.cfg.Log.Warn("cannot act on some notes of the CNI plugin", "error", err)
	}
	valid := map[podnet.Key]bool{}
	for _, a := range r.GetValid() {
		valid[podnet.Key{ContainerID: a.GetContainerId(), Interface: a.GetInterface()}] = true
	}
	out := &skeinv1.CNIGCResponse{}
	var errs []error
	for _, l := range s.cfg.Allocator.Leases() {
		if valid[l.Key] || !collectable(l, r.GetNetwork()) {
			continue
		}
		err := s.keys.with(ctx, l.Key, func() error {
			if now, ok := s.cfg.Allocator.Lookup(l.Key); !ok || !now.Since.Equal(l.Since) {
				return errStays // it ended by itself, or another ADD came
			}
			if r.GetUnlisted() {
				if gone, err := s.surelyGone(ctx, l); err != nil || !gone {
					return cmp.Or(err, errStays)
				}
			}
			return s.remove(ctx, l.Key, "", "not listed as valid any more (CNI GC)")
		})
		if errors.Is(err, errStays) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.cfg.Log.Info("GC has removed an attachment", "network", l.Network, "container", l.Key.ContainerID, "interface",
			l.Key.Interface, "ipv4", l.IPv4, "ipv6", l.IPv6)
		out.Removed = append(out.Removed, &skeinv1.CNIAttachment{ContainerId: l.Key.ContainerID, Interface: l.Key.Interface})
	}
	return out, s.report("GC", podnet.Key{}, began, errors.Join(errs...))
}

// errStays is GC's own: an attachment is none of its business after all.
var errStays = errors.New("it stays")

// surelyGone tells whether an attachment has neither a link nor a network namespace any more.
func (s *Server) surelyGone(ctx context.Context, l ipam.Lease) (bool, error) {
	if _, err := os.Stat(l.NetNS); l.NetNS == "" || !errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	var there bool
	err := s.kernel(ctx, func() (err error) {
		there, err = s.cfg.Network.Has(l.Key)
		return err
	})
	return !there, err
}

// collectable tells whether GC for a network may look at a lease: only what was added under that very name. A lease
// whose network is not known, since it was read from the kernel, is left to the search for leaks, which looks at
// namespaces.
func collectable(l ipam.Lease, network string) bool {
	return network != "" && l.Network == network && l.Until.IsZero()
}
