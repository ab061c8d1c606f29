package cniserver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Status tells whether an ADD could succeed.
func (s *Server) Status(ctx context.Context, _ *skeinv1.CNIStatusRequest) (*skeinv1.CNIStatusResponse, error) {
	began := time.Now()
	return &skeinv1.CNIStatusResponse{}, s.report("STATUS", podnet.Key{}, began, s.Able(ctx))
}

// Able tells what Status does, to the agent itself.
func (s *Server) Able(ctx context.Context) error {
	return judge(s.cfg.Condition(ctx), rights(), s.cfg.Allocator.Ready())
}

// judge decides what STATUS says: 51 where running pods may be cut off too, else 50 where no ADD can succeed.
func judge(c Condition, rights, addresses error) error {
	switch {
	case c.Limited != "":
		return refuse(cni.CodeLimited, c.Limited, "pods that run may not reach others: see `skein status` for what is wrong")
	case rights != nil:
		return refuse(cni.CodeUnavailable, rights.Error(), "give the agent these capabilities, in its systemd unit or pod, "+
			"and start it again; pods that run are not touched")
	case c.NoAdd != "":
		return refuse(cni.CodeUnavailable, c.NoAdd, "pods that run are not touched: see `skein status`")
	}
	var e *ipam.Error
	if errors.As(addresses, &e) {
		return refuse(cni.CodeUnavailable, e.Message, strings.Trim(e.Advice+"; pods that run are not touched", "; "))
	}
	if addresses != nil {
		return refuse(cni.CodeUnavailable, addresses.Error(), "pods that run are not touched")
	}
	return nil
}

// rights says which capabilities are missing that entering a pod's network namespace and making links there needs.
func rights() error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return fmt.Errorf("the agent cannot read its capabilities: %w", err)
	}
	return lacking(data[0].Effective)
}

// lacking judges a set of capabilities.
func lacking(effective uint32) error {
	var names []string
	for _, c := range []struct {
		bit  uint
		name string
	}{{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}} {
		if effective&(1<<c.bit) == 0 {
			names = append(names, c.name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("the agent lacks %s, which it needs to enter the network namespaces of pods",
		strings.Join(names, " and "))
}
