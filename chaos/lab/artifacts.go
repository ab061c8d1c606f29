package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// maxArtifact is the largest file that is copied, in bytes.
const maxArtifact = 64 << 20

// SaveArtifacts writes all there is to know of the lab into a new folder below base and returns it:
// the lab file, each node's log, config, state and what its agent says, and the kernel's tables of
// every namespace. It holds the lab's throw-away keys and is readable by its owner only.
func (l *Lab) SaveArtifacts(ctx context.Context, base string) (string, error) {
	dir := filepath.Join(base, l.Spec.Name+"-"+time.Now().Format("20060102-150405.000"))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("artifacts: %w", err)
	}
	errs := []error{
		os.WriteFile(filepath.Join(dir, "lab.yaml"), l.Spec.Source, 0o600),
		copyFile(recordFile(l.Dir), filepath.Join(dir, "lab.json")),
		dump(fabric.Core(l.Spec.Name), filepath.Join(dir, "core-kernel.txt")),
	}
	if _, err := os.Stat(l.routerDir("")); err == nil {
		errs = append(errs, copyTree(l.routerDir(""), filepath.Join(dir, "routers")))
	}
	for _, s := range l.Plan.Sites {
		errs = append(errs, dump(fabric.Router(l.Spec.Name, s.Name), filepath.Join(dir, "router-"+s.Name+"-kernel.txt")))
	}
	for _, h := range l.hosts {
		errs = append(errs, dump(h.ns, filepath.Join(dir, "host-"+h.node.Name+"-kernel.txt")))
	}
	errs = append(errs, each(l.agents, func(a *agent) error {
		to := filepath.Join(dir, "nodes", a.node.Name)
		if err := os.MkdirAll(to, 0o700); err != nil {
			return err
		}
		return errors.Join(
			copyTree(a.stateDir(), filepath.Join(to, "state")),
			copyFile(a.logFile(), filepath.Join(to, "agent.log")),
			copyFile(a.configFile(), filepath.Join(to, "skein.yaml")),
			dump(a.ns, filepath.Join(to, "kernel.txt")),
			dumpGateways(a, to),
			l.interview(ctx, a, to),
		)
	}))
	if err := errors.Join(errs...); err != nil {
		return dir, fmt.Errorf("artifacts in %s are not complete: %w", dir, err)
	}
	return dir, nil
}

// interview writes down what an agent answers; one that does not answer has said so in its log.
func (l *Lab) interview(ctx context.Context, a *agent, dir string) error {
	if !a.record().Process.alive() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ask := map[string]func() (proto.Message, error){
		"status":   func() (proto.Message, error) { return a.client.Status(ctx, &skeinv1.StatusRequest{}) },
		"nodes":    func() (proto.Message, error) { return a.client.Nodes(ctx, &skeinv1.NodesRequest{}) },
		"peers":    func() (proto.Message, error) { return a.client.Peers(ctx, &skeinv1.PeersRequest{}) },
		"netcheck": func() (proto.Message, error) { return a.client.Netcheck(ctx, &skeinv1.NetcheckRequest{}) },
		"plan":     func() (proto.Message, error) { return a.client.Plan(ctx, &skeinv1.PlanRequest{Diff: true}) },
	}
	for _, n := range l.Spec.Nodes {
		if n.Name != a.node.Name && n.Role != RoleHost {
			ask["explain-"+n.Name] = func() (proto.Message, error) {
				return a.client.ExplainPeer(ctx, &skeinv1.ExplainPeerRequest{Peer: n.Name})
			}
		}
	}
	var errs []error
	for name, fn := range ask {
		text := ""
		if m, err := fn(); err != nil {
			text = "error: " + err.Error() + "\n"
		} else {
			text = protojson.MarshalOptions{Multiline: true, EmitUnpopulated: true}.Format(m) + "\n"
		}
		errs = append(errs, os.WriteFile(filepath.Join(dir, name+".json"), []byte(text), 0o600))
	}
	return errors.Join(errs...)
}

// dumpGateways writes down the kernel's tables of the namespaces of egresses on a node.
func dumpGateways(a *agent, dir string) error {
	bound, err := filepath.Glob(filepath.Join(a.runDir(), "netns", "*"))
	for _, path := range bound {
		err = errors.Join(err, dump(path, filepath.Join(dir, "egress-"+filepath.Base(path)+"-kernel.txt")))
	}
	return err
}

func dump(ns, file string) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(fabric.Dump(ns, f), f.Close())
}

func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			return os.MkdirAll(filepath.Join(to, rel), 0o700)
		case d.Type().IsRegular():
			return copyFile(path, filepath.Join(to, rel))
		}
		return nil
	})
}

// copyFile copies up to maxArtifact bytes; a file that is not there is no error.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, io.LimitReader(in, maxArtifact))
	return errors.Join(err, out.Close())
}
