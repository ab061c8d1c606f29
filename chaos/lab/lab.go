package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/netnsdir"
)

// DefaultDir is where labs keep their directories, one per name.
const DefaultDir = "/run/skein-lab"

// maxSocketPath is the longest path of a unix socket, in bytes (sun_path in unix(7)).
const maxSocketPath = 107

// Options say how a lab is brought up.
type Options struct {
	Dir       string       // where labs keep their directories; default DefaultDir
	Binary    string       // the skein program; default the one that runs now
	Env       []string     // more environment for agents and commands
	Progress  func(string) // told what happens, a line each; may be nil
	Artifacts string       // where Up leaves logs and states when it fails; "": nowhere
	AtOnce    int          // how many agents join at the same time; 0: all

	// Enter returns what stands before a node's commands, its agent's too: for instance a program that puts them into
	// a mount namespace of the node's own. May be nil.
	Enter func(node string) []string
	// called for each node when its agent is a running member, from several goroutines; may be nil
	Joined func(l *Lab, node string)
}

// Lab is a lab that is up.
type Lab struct {
	Spec *Spec
	Plan fabric.Plan // as it was built; Network tells how it is
	Dir  string      // this lab's own directory

	opts    Options
	agents  []*agent
	hosts   []*agent   // nodes without one: only name, namespace and directory are of use
	pings   []running  // by the one who runs the steps
	flows   []flowing  // likewise
	servers []server   // likewise
	mu      sync.Mutex // guards what follows and the record on disk
	cuts    map[Cut]bool
	zombies map[NotForwarded]bool
	daemons map[string]process // of routers that map ports, by site
	now     fabric.Plan
	changes []Change
}

// Up builds the network, starts every agent and waits until all are running members. On an error,
// or when ctx ends, everything is taken down again.
func Up(ctx context.Context, spec *Spec, opts Options) (*Lab, error) {
	l, err := raise(ctx, spec, opts)
	if err == nil || l == nil {
		return l, err
	}
	if opts.Artifacts != "" {
		if dir, aerr := l.SaveArtifacts(context.WithoutCancel(ctx), opts.Artifacts); aerr == nil {
			err = fmt.Errorf("%w\nlogs and states are in %s", err, dir)
		}
	}
	return nil, errors.Join(err, l.Down(context.WithoutCancel(ctx)))
}

// raise is Up without the clearing away. It returns no Lab when nothing was begun.
func raise(ctx context.Context, spec *Spec, opts Options) (*Lab, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a lab needs root, for network namespaces: run it with sudo")
	}
	plan, err := spec.Plan()
	if err != nil {
		return nil, err
	}
	if opts.Binary == "" {
		if opts.Binary, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("find the skein program: %w", err)
		}
	}
	if len(spec.Nodes) >= manyNodes {
		if err := RaiseInotify(); err != nil {
			return nil, err
		}
	}
	l := newLab(spec, plan, opts)
	if err := l.free(); err != nil {
		return nil, err
	}
	if err := l.lay(); err != nil {
		return l, err
	}
	l.progress("network: %d sites, %d nodes", len(spec.Sites), len(plan.Hosts))
	if err := fabric.Build(ctx, plan); err != nil {
		return l, fmt.Errorf("build the network of lab %s: %w", spec.Name, err)
	}
	if err := l.startPortmaps(ctx); err != nil {
		return l, err
	}
	return l, l.join(ctx)
}

func newLab(spec *Spec, plan fabric.Plan, opts Options) *Lab {
	if opts.Dir == "" {
		opts.Dir = DefaultDir
	}
	l := &Lab{Spec: spec, Plan: plan, Dir: filepath.Join(opts.Dir, spec.Name), opts: opts, cuts: map[Cut]bool{},
		zombies: map[NotForwarded]bool{}, daemons: map[string]process{}, now: plan}
	for _, n := range spec.Nodes {
		if n.Role == RoleHost {
			l.hosts = append(l.hosts, newAgent(l, n))
		} else {
			l.agents = append(l.agents, newAgent(l, n))
		}
	}
	return l
}

// free makes sure that no lab of this name is up or was left behind.
func (l *Lab) free() error {
	left, err := fabric.Namespaces(l.Spec.Name)
	if err != nil {
		return err
	}
	_, err = os.Stat(l.Dir)
	if len(left) > 0 || err == nil {
		return fmt.Errorf("a lab named %s is up, or was left behind by a crash: `skein lab down %s` removes it",
			l.Spec.Name, l.Spec.Name)
	}
	for _, a := range l.agents {
		if n := len(a.socket()); n > maxSocketPath {
			return fmt.Errorf("the socket's path %s has %d bytes, the system allows %d: choose a shorter directory", a.socket(),
				n, maxSocketPath)
		}
	}
	return nil
}

// lay makes the directories and the agents' config files, and notes the lab on disk.
func (l *Lab) lay() error {
	if err := os.MkdirAll(filepath.Join(l.Dir, "bin"), 0o700); err != nil {
		return fmt.Errorf("lab directory: %w", err)
	}
	for _, name := range []string{"skein", cniPlugin} {
		if err := os.Symlink(l.opts.Binary, filepath.Join(l.Dir, "bin", name)); err != nil {
			return fmt.Errorf("lab directory: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(l.Dir, "lab.yaml"), l.Spec.Source, 0o600); err != nil {
		return fmt.Errorf("lab directory: %w", err)
	}
	for _, h := range l.hosts {
		if err := os.MkdirAll(h.dir, 0o700); err != nil {
			return fmt.Errorf("node %s: %w", h.node.Name, err)
		}
	}
	for _, a := range l.agents {
		for _, dir := range []string{a.stateDir(), a.runDir()} {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return fmt.Errorf("node %s: %w", a.node.Name, err)
			}
		}
		b, err := yaml.Marshal(l.config(a.node))
		if err != nil {
			return fmt.Errorf("node %s: config: %w", a.node.Name, err)
		}
		if err := os.WriteFile(a.configFile(), b, 0o600); err != nil {
			return fmt.Errorf("node %s: config: %w", a.node.Name, err)
		}
	}
	return l.save()
}

// config is what the lab writes for an agent, with the file's own settings over it.
func (l *Lab) config(n Node) map[string]any {
	// wherever the lab itself runs
	c := map[string]any{"name": n.Name, "site": n.Site, "natTraversal": map[string]any{"imds": "false"}}
	if n.Server {
		c["server"] = true
	}
	if n.Leader {
		c["leader"] = true
	}
	if n.Relay != "" {
		c["relay"] = n.Relay
	}
	if n.Labels != nil {
		c["labels"] = n.Labels
	}
	return merge(merge(c, l.Spec.Config), n.Config)
}

// merge lays one mapping over another, into their sub-mappings.
func merge(under, over map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range under {
		out[k] = v
	}
	for k, v := range over {
		a, aok := out[k].(map[string]any)
		b, bok := v.(map[string]any)
		if aok && bok {
			v = merge(a, b)
		}
		out[k] = v
	}
	return out
}

// binary is the skein program under a name of its own, so that `skein` is found inside the lab.
func (l *Lab) binary() string { return filepath.Join(l.Dir, "bin", "skein") }

// command is argv as it is to be started for a node: behind what Options.Enter says. path is the program's file.
func (l *Lab) command(ctx context.Context, node, path string, argv []string) *exec.Cmd {
	var enter []string
	if l.opts.Enter != nil {
		enter = l.opts.Enter(node)
	}
	if len(enter) == 0 {
		cmd := exec.CommandContext(ctx, path, argv[1:]...)
		cmd.Args[0] = argv[0]
		return cmd
	}
	argv = slices.Concat(enter, []string{path}, argv[1:])
	return exec.CommandContext(ctx, argv[0], argv[1:]...)
}

// environ is the environment of a node's processes.
func (l *Lab) environ(a *agent) []string {
	env := []string{"PATH=" + filepath.Join(l.Dir, "bin") + ":" + os.Getenv("PATH")}
	for _, k := range []string{"HOME", "TERM", "LANG", "NO_COLOR", "SSL_CERT_DIR", "GOTRACEBACK", "GOCOVERDIR"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	env = append(env, "SKEIN_STATE_DIR="+a.stateDir(), "SKEIN_RUN_DIR="+a.runDir(), "SKEIN_LAB="+l.Spec.Name,
		"SKEIN_NODE="+a.node.Name)
	return append(env, l.opts.Env...)
}

func (l *Lab) progress(format string, args ...any) {
	if l.opts.Progress != nil {
		l.opts.Progress(fmt.Sprintf(format, args...))
	}
}

// join makes one mesh after the other.
func (l *Lab) join(ctx context.Context) error {
	for _, mesh := range l.Spec.meshes() {
		if err := l.joinMesh(ctx, mesh); err != nil {
			return err
		}
	}
	return nil
}

// joinMesh creates a cluster on its initialiser and lets all others of the mesh join at once.
func (l *Lab) joinMesh(ctx context.Context, mesh string) error {
	if l.Spec.initialiser(mesh).Late { // somebody makes this mesh in a step, or nobody
		return nil
	}
	first, err := l.agent(l.Spec.initialiser(mesh).Name)
	if err != nil {
		return err
	}
	start := time.Now()
	if err := l.launch(first, "--init"); err != nil {
		return err
	}
	if err := l.joined(ctx, first); err != nil {
		return err
	}
	l.progress("cluster created by %s in %s", first.node.Name, round(time.Since(start)))
	if mesh == "" {
		if err := l.makeSettings(ctx, first); err != nil {
			return err
		}
	}
	var others, now []*agent
	for _, a := range l.agents {
		if a == first || a.node.Mesh != mesh {
			continue
		}
		others = append(others, a)
		if !a.node.Late {
			now = append(now, a)
		}
	}
	if err := l.makeTokens(ctx, first, others); err != nil {
		return err
	}
	if len(now) > 0 {
		if err := l.admit(ctx, now); err != nil {
			return err
		}
		l.progress("%d nodes joined in %s", len(now), round(time.Since(start)))
	}
	if mesh == "" {
		err = l.makePools(ctx, first)
	}
	if err == nil && mesh == "" {
		err = l.makeEgresses(ctx, first)
	}
	return errors.Join(err, l.save())
}

// makeSettings gives the cluster the file's settings, before anybody joins it.
func (l *Lab) makeSettings(ctx context.Context, on *agent) error {
	r := &skeinv1.SettingsRequest{Change: l.Spec.Settings}
	r.GetChange().ProtoReflect().Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		r.Fields = append(r.Fields, string(f.Name()))
		return true
	})
	if len(r.GetFields()) == 0 {
		return nil
	}
	if _, err := on.client.Settings(ctx, r); err != nil {
		return fmt.Errorf("the cluster's settings: %w", err)
	}
	return nil
}

// makePools makes the file's address pools. Other agents hear of them in a moment: {wait: converged}.
func (l *Lab) makePools(ctx context.Context, on *agent) error {
	for _, p := range l.Spec.Pools {
		if _, err := on.client.CreatePool(ctx, &skeinv1.CreatePoolRequest{Pool: p}); err != nil {
			return fmt.Errorf("make pool %s: %w", p.GetName(), err)
		}
	}
	return nil
}

// admit lets agents join by the tokens that there are.
func (l *Lab) admit(ctx context.Context, others []*agent) error {
	atOnce := l.opts.AtOnce
	if atOnce <= 0 {
		atOnce = len(others)
	}
	seats := make(chan struct{}, atOnce)
	return each(others, func(a *agent) error {
		select {
		case seats <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		defer func() { <-seats }()
		if err := l.launch(a, "--join-file", l.tokenFile(a.node)); err != nil {
			return err
		}
		return l.joined(ctx, a)
	})
}

// joined waits until an agent is a running member, and says so.
func (l *Lab) joined(ctx context.Context, a *agent) error {
	err := a.ready(ctx, true)
	if err == nil && l.opts.Joined != nil {
		l.opts.Joined(l, a.node.Name)
	}
	return err
}

// makeTokens makes a token for each role that the nodes have.
func (l *Lab) makeTokens(ctx context.Context, first *agent, others []*agent) error {
	uses := map[string]uint32{}
	for _, a := range others {
		uses[l.tokenFile(a.node)]++
	}
	for _, a := range others {
		file := l.tokenFile(a.node)
		if uses[file] == 0 {
			continue
		}
		r := &skeinv1.CreateTokenRequest{Uses: uses[file], LifetimeNanos: int64(time.Hour), Label: "lab",
			Role: string(a.node.role())}
		token, err := first.client.CreateToken(ctx, r)
		if err != nil {
			return fmt.Errorf("node %s: create a token: %w", first.node.Name, err)
		}
		if err := os.WriteFile(file, []byte(token.GetToken()+"\n"), 0o600); err != nil {
			return fmt.Errorf("token: %w", err)
		}
		uses[file] = 0
	}
	return nil
}

// tokenFile holds the token by which nodes with this one's role join.
func (l *Lab) tokenFile(n Node) string {
	name := "token-" + string(n.role())
	if n.Mesh != "" {
		name += "-" + n.Mesh
	}
	return filepath.Join(l.Dir, name)
}

// launch starts an agent and notes its process on disk at once, for a later `skein lab down`.
func (l *Lab) launch(a *agent, extra ...string) error {
	return errors.Join(a.launch(l, extra...), l.save())
}

// Down ends every agent and removes all that the lab made. It works on a Lab that is half up, too.
func (l *Lab) Down(ctx context.Context) error {
	l.endFlows()
	l.endServers()
	return Down(ctx, l.Spec.Name, l.opts.Dir)
}

// gatewayNamespaces matches the files that agents of a lab in dir bind the namespaces of egresses to.
func gatewayNamespaces(dir string) string {
	return filepath.Join(dir, "nodes", "*", "run", "netns", "*")
}

// releaseNetNS takes away the mounts that agents of a lab in dir made of the directories for those files: a directory
// that is one cannot be removed.
func releaseNetNS(dir string) error {
	made, err := filepath.Glob(filepath.Dir(gatewayNamespaces(dir)))
	for _, d := range made {
		err = errors.Join(err, netnsdir.Release(d))
	}
	return err
}

// Down takes a lab down by its name, whatever state it is in: also after a crash of whoever brought
// it up. What it finds it removes; finding nothing is not an error. dir is as in Options.
func Down(ctx context.Context, name, dir string) error {
	if !nameRule.MatchString(name) {
		return fmt.Errorf("%q is not a name of a lab; allowed: up to 32 of a-z, 0-9 and -, not - at the ends", name)
	}
	if dir == "" {
		dir = DefaultDir
	}
	if err := fabric.Teardown(ctx, name); err != nil {
		return fmt.Errorf("take down lab %s: %w", name, err)
	}
	bound, err := filepath.Glob(gatewayNamespaces(filepath.Join(dir, name)))
	if err == nil {
		err = fabric.Unbind(ctx, bound)
	}
	if err == nil {
		err = releaseNetNS(filepath.Join(dir, name))
	}
	if err != nil {
		return fmt.Errorf("take down lab %s: %w", name, err)
	}
	if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("take down lab %s: %w", name, err)
	}
	return nil
}

func (l *Lab) agent(name string) (*agent, error) {
	for _, a := range l.agents {
		if a.node.Name == name {
			return a, nil
		}
	}
	if h, err := l.host(name); err == nil {
		return nil, fmt.Errorf("node %s is a host without an agent (role: host)", h.node.Name)
	}
	return nil, fmt.Errorf("lab %s has no node %q; nodes: %s", l.Spec.Name, name, strings.Join(l.Spec.HostNames(), ", "))
}

// host finds a node, with or without an agent.
func (l *Lab) host(name string) (*agent, error) {
	for _, list := range [][]*agent{l.agents, l.hosts} {
		for _, a := range list {
			if a.node.Name == name {
				return a, nil
			}
		}
	}
	return nil, fmt.Errorf("lab %s has no node %q; nodes: %s", l.Spec.Name, name, strings.Join(l.Spec.HostNames(), ", "))
}

func (l *Lab) pick(names []string) ([]*agent, error) {
	var out []*agent
	for _, n := range names {
		a, err := l.agent(n)
		if err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	return out, nil
}

// Info is what there is to know of a node from outside.
type Info struct {
	Name, Site string
	Host       fabric.Host
	Namespace  string
	Dir        string // its state, run, skein.yaml and agent.log
	Log        string
	Condition  Condition
	PID        int
	Alive      bool
	Joined     bool
	Overlay    []string // its overlay addresses, as far as it has told them
}

// Node tells about a node.
func (l *Lab) Node(name string) (Info, error) {
	a, err := l.host(name)
	if err != nil {
		return Info{}, err
	}
	rec := a.record()
	host, _ := l.Network().Host(a.node.host())
	info := Info{Name: name, Site: host.Site, Host: host, Namespace: a.ns, Dir: a.dir, Log: a.logFile(),
		Condition: rec.Condition, PID: rec.Process.PID, Alive: rec.Process.alive(), Joined: rec.Joined}
	if rec.IPv4.IsValid() {
		info.Overlay = append(info.Overlay, rec.IPv4.String())
	}
	if rec.IPv6.IsValid() {
		info.Overlay = append(info.Overlay, rec.IPv6.String())
	}
	return info, nil
}

// Client returns the API of a node's agent.
func (l *Lab) Client(name string) (skeinv1connect.AgentServiceClient, error) {
	a, err := l.agent(name)
	if err != nil {
		return nil, err
	}
	return a.client, nil
}

// Running lists the nodes whose agents should run now.
func (l *Lab) Running() []string {
	var names []string
	for _, a := range l.agents {
		if a.record().Condition == Running {
			names = append(names, a.node.Name)
		}
	}
	return names
}

func round(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(10 * time.Millisecond)
}

// sorted returns a copy in order.
func sorted(names []string) []string { return slices.Sorted(slices.Values(names)) }
