package main

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent"
	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/kube"
)

// nodeVariable names the Node that the agent of a pod runs on; the chart sets it.
const nodeVariable = "SKEIN_NODE"

// tokenOf is what a join token says of itself.
func tokenOf(text string) (cluster, id string, err error) {
	t, err := admission.DecodeToken(text)
	return t.GetClusterId(), t.GetTokenId(), err
}

// enterByKubernetes has an agent that is not a member yet become one by the objects of the chart.
func enterByKubernetes(o *agent.Options, server bool) error {
	k := o.Config.Kubernetes
	if k.Kubeconfig == "" || k.Node == "" {
		return cli.UsageError{Err: errors.New("--join-kubernetes needs kubernetes.kubeconfig in the configuration, and " +
			"the Node's name in kubernetes.node or in the environment variable " + nodeVariable)}
	}
	e := &kube.Entrance{
		Kubeconfig: k.Kubeconfig, Node: k.Node, Server: server, Dir: o.Config.StateDir, TokenOf: tokenOf,
		Log: o.Log.With("component", "kubernetes"),
	}
	used := ""
	o.Enter = func(ctx context.Context, refused error) (agent.Entry, error) {
		if refused == nil {
			used = ""
		}
		token, create, err := e.Enter(ctx, used)
		used = token
		return agent.Entry{Token: token, Create: create}, err
	}
	ready := o.OnReady
	o.OnReady = func() {
		if err := kube.Entered(o.Config.StateDir); err != nil {
			o.Log.Warn("cannot remove the note that this host was to create a mesh, which it no longer needs", "error", err)
		}
		ready()
	}
	writableSysctls(o)
	return nil
}

// writableSysctls takes back that the container's runtime has made /proc/sys read-only, as it does for all that are not
// privileged: the agent sets forwarding and the source check of its own links. It needs CAP_SYS_ADMIN.
func writableSysctls(o *agent.Options) {
	var st unix.Statfs_t
	if err := unix.Statfs("/proc/sys", &st); err != nil || st.Flags&unix.ST_RDONLY == 0 {
		return
	}
	const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("", "/proc/sys", "", flags, ""); err != nil {
		o.Log.Warn("cannot make /proc/sys writable, so forwarding between tunnels and pods stays as the host has it; "+
			"give the container CAP_SYS_ADMIN", "error", os.NewSyscallError("mount", err))
	}
}
