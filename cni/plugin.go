package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Called tells whether this run of the program is one of the plugin: a runtime sets CNI_COMMAND and gives no arguments.
// `skein cni` is the plugin too, for a configuration's file name that is a script.
func Called(args []string, getenv func(string) string) bool {
	if len(args) == 0 {
		return false
	}
	rest := args[1:]
	switch {
	case len(rest) == 0 && filepath.Base(args[0]) == Type:
		return true
	case len(rest) == 0 || slices.Equal(rest, []string{"cni"}):
		return getenv("CNI_COMMAND") != ""
	}
	return false
}

// Main is one run of the plugin, with the process's environment, input and outputs. It returns the exit status.
func Main(release string) int {
	log.SetFlags(0)
	log.SetPrefix(Type + ": ")
	p := &plugin{}
	e := p.run(release)
	if e == nil {
		if _, err := os.Stdout.Write(p.out.Bytes()); err != nil {
			e = complaint(uint32(types.ErrIOFailure), "the result could not be written: "+err.Error(), "the runtime must read "+
				"standard output")
		}
	}
	if e == nil {
		return 0
	}
	if err := printError(os.Stdout, p.version(), e); err != nil {
		log.Print(err)
	}
	return 1
}

// plugin is one run. The result is held back until all has gone well.
type plugin struct {
	stdin []byte
	out   bytes.Buffer
}

func (p *plugin) run(release string) *types.Error {
	command := os.Getenv("CNI_COMMAND")
	if command != "" && command != "VERSION" {
		if e := p.read(os.Stdin); e != nil {
			return e
		}
	}
	os.Setenv("CNI_NETNS_OVERRIDE", "1") // add has looked, before anything was made; DEL must not fail for it
	if e := checkEnvironment(command, os.Getenv); e != nil {
		return e
	}
	funcs := skel.CNIFuncs{Add: p.add, Del: p.del, Check: p.check, GC: p.gc, Status: p.status}
	return advise(skel.PluginMainFuncsWithError(funcs, version.PluginSupports(Versions()...), "skein's CNI plugin, "+
		"version "+release+". Container runtimes run it; `skein cni install` puts it in place."))
}

// checkEnvironment looks at the names before the library does, whose errors do not say which variable is wrong.
func checkEnvironment(command string, getenv func(string) string) *types.Error {
	if command != "ADD" && command != "DEL" && command != "CHECK" {
		return nil
	}
	id, name := getenv("CNI_CONTAINERID"), getenv("CNI_IFNAME")
	switch {
	case id != "" && utils.ValidateContainerID(id) != nil:
		return checkNames(podnet.Key{ContainerID: id, Interface: "eth0"})
	case name != "" && utils.ValidateInterfaceName(name) != nil:
		return checkNames(podnet.Key{ContainerID: "c", Interface: name})
	}
	return nil
}

// advise gives errors of the library the next step that they lack.
func advise(e *types.Error) *types.Error {
	if e == nil {
		return nil
	}
	switch step := nextSteps[uint32(e.Code)]; {
	case e.Details == "":
		e.Details = step
	case e.Msg == "incompatible CNI versions":
		e.Details += "; " + step
	}
	return e
}

var nextSteps = map[uint32]string{
	uint32(types.ErrIncompatibleCNIVersion): "set cniVersion in the network configuration to one of " +
		strings.Join(Versions(), ", ") + "; CHECK needs 0.4.0, GC and STATUS 1.1.0",
	uint32(types.ErrDecodingFailure): "the runtime must pass the network configuration, as JSON, on standard input",
	CodeEnvironment:                  "the runtime must set them as the CNI specification says",
	CodeConfig:                       "give the network a name of letters, digits, dots, underscores and hyphens",
}

// read takes standard input, up to a bound, and puts a pipe with the same bytes in its place: the library reads without
// one.
func (p *plugin) read(in io.Reader) *types.Error {
	b, err := readBounded(in, maxInput)
	switch {
	case errors.Is(err, errTooLong):
		return complaint(CodeConfig, fmt.Sprintf("the network configuration on standard input is larger than %d MiB",
			maxInput>>20), "no configuration is that long: see what the runtime passes")
	case err != nil:
		return complaint(uint32(types.ErrIOFailure), "standard input cannot be read: "+err.Error(), "the runtime must pass "+
			"the network configuration there")
	}
	r, w, err := os.Pipe()
	if err != nil {
		return complaint(uint32(types.ErrIOFailure), "standard input cannot be passed on: "+err.Error(),
			"see whether the host is out of file descriptors")
	}
	go func() {
		w.Write(b) // fails only when nobody reads, who then needs none of it
		w.Close()
	}()
	p.stdin, os.Stdin = b, r
	return nil
}

// version is what errors carry as cniVersion: the configuration's, where it is one that we speak.
func (p *plugin) version() string {
	v, err := (&version.ConfigDecoder{}).Decode(p.stdin)
	if err != nil || !slices.Contains(Versions(), v) {
		v = Versions()[len(Versions())-1]
	}
	return v
}

// failed makes an error of a complaint that may be nil.
func failed(e *types.Error) error {
	if e == nil {
		return nil
	}
	return e
}

func (p *plugin) add(a *skel.CmdArgs) error {
	c, e := parseConfig(a.StdinData)
	if e == nil {
		e = checkNames(keyOf(a))
	}
	if e == nil {
		e = ownNamespace(a.Netns)
	}
	if e != nil {
		return e
	}
	pod, e := parseArgs(a.Args)
	if e != nil {
		return e
	}
	ips, e := c.wanted(pod)
	if e != nil {
		return e
	}
	ctx, cancel := context.WithTimeout(context.Background(), addTimeout)
	defer cancel()
	r, err := client(c.Socket).Add(ctx, &skeinv1.CNIAddRequest{
		Attachment: attachment(a), Netns: a.Netns, Namespace: pod.namespace, Pod: pod.pod, Ips: ips, Pool: c.pool(),
		Network: c.Name, Annotations: c.annotations(),
	})
	if err != nil {
		return asComplaint(err, c.Socket, addTimeout)
	}
	out, err := result(c, a.IfName, a.Netns, r)
	if err != nil {
		return complaint(CodeInternal, err.Error(), "plugin and agent may be of different versions: run `skein cni "+
			"install` again")
	}
	return p.print(out, c.CNIVersion)
}

// print keeps a result in the configuration's version.
func (p *plugin) print(r types.Result, as string) error {
	r, err := r.GetAsVersion(as)
	if err == nil {
		err = r.PrintTo(&p.out)
	}
	if err != nil {
		return complaint(CodeInternal, "the result cannot be written in version "+as+": "+err.Error(),
			"choose another cniVersion in the network configuration")
	}
	return nil
}

// ownNamespace refuses the namespace that we are in ourselves. The library would too, but only after the ADD was made.
func ownNamespace(path string) *types.Error {
	same, e := ns.CheckNetNS(path)
	if e == nil && same {
		e = complaint(CodeEnvironment, "CNI_NETNS "+path+" is the host's own network namespace", "the runtime must pass "+
			"the container's; pods with host networking need no plugin")
	}
	return e
}

func keyOf(a *skel.CmdArgs) podnet.Key {
	return podnet.Key{ContainerID: a.ContainerID, Interface: a.IfName}
}

func attachment(a *skel.CmdArgs) *skeinv1.CNIAttachment {
	return &skeinv1.CNIAttachment{ContainerId: a.ContainerID, Interface: a.IfName}
}

// del never fails for what is gone, for an agent that is away, or for a configuration that is wrong by now: a pod that
// cannot be removed helps nobody.
func (p *plugin) del(a *skel.CmdArgs) error {
	if e := checkNames(keyOf(a)); e != nil {
		log.Printf("DEL: %v: no ADD can have made it", e)
		return nil
	}
	socket := socketOf(a.StdinData)
	err := errors.New("its socket is not known: the network configuration is wrong")
	if socket != "" {
		ctx, cancel := context.WithTimeout(context.Background(), delTimeout)
		defer cancel()
		if _, err = client(socket).Del(ctx, &skeinv1.CNIDelRequest{Attachment: attachment(a), Netns: a.Netns}); err == nil {
			return nil
		}
		err = asComplaint(err, socket, delTimeout)
	}
	log.Printf("DEL without the agent: %v", err)
	if err := unlink(a.Netns, keyOf(a)); err != nil {
		log.Printf("removing %s of %s: %v", a.IfName, a.ContainerID, err)
	}
	if socket == "" {
		return nil
	}
	if err := WriteNote(NoteDir(socket), Note{keyOf(a), a.Netns}); err != nil {
		log.Printf("%v: the agent finds the address by itself, later", err)
	}
	return nil
}

// unlink removes the link on a thread of its own, which ends with it.
func unlink(netns string, k podnet.Key) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- podnet.Del(netns, k)
	}()
	return <-done
}

func (p *plugin) check(a *skel.CmdArgs) error {
	c, e := parseConfig(a.StdinData)
	if e == nil {
		e = checkNames(keyOf(a))
	}
	if e != nil {
		return e
	}
	ips, e := expected(c, a.IfName, a.Netns)
	if e != nil {
		return e
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	if _, err := client(c.Socket).Check(ctx, &skeinv1.CNICheckRequest{Attachment: attachment(a), Netns: a.Netns,
		Ips: ips}); err != nil {
		return asComplaint(err, c.Socket, checkTimeout)
	}
	return nil
}

// gc hands the list on. Without an agent nothing is freed, and the agent looks for leaks by itself when it is back.
func (p *plugin) gc(a *skel.CmdArgs) error {
	c, e := parseConfig(a.StdinData)
	if e != nil {
		return e
	}
	valid, listed, e := stillValid(a.StdinData)
	if e != nil {
		return e
	}
	req := &skeinv1.CNIGCRequest{Network: c.Name, Unlisted: !listed}
	for _, v := range valid {
		if e := checkNames(podnet.Key{ContainerID: v.ContainerID, Interface: v.IfName}); e != nil {
			log.Printf("GC: %v: no ADD can have made it", e)
			continue
		}
		req.Valid = append(req.Valid, &skeinv1.CNIAttachment{ContainerId: v.ContainerID, Interface: v.IfName})
	}
	ctx, cancel := context.WithTimeout(context.Background(), gcTimeout)
	defer cancel()
	r, err := client(c.Socket).GC(ctx, req)
	for _, gone := range r.GetRemoved() {
		log.Printf("GC: removed %s of %s", gone.GetInterface(), gone.GetContainerId())
	}
	if err == nil {
		return nil
	}
	if e = asComplaint(err, c.Socket, gcTimeout); uint32(e.Code) == CodeTryAgain {
		log.Printf("GC without the agent: %v", e)
		return nil
	}
	return e
}

func (p *plugin) status(a *skel.CmdArgs) error {
	c, e := parseConfig(a.StdinData)
	if e != nil {
		return e
	}
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	if _, err := client(c.Socket).Status(ctx, &skeinv1.CNIStatusRequest{Network: c.Name}); err != nil {
		return asStatus(asComplaint(err, c.Socket, statusTimeout))
	}
	return nil
}
