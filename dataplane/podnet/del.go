package podnet

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Del removes the link of an attachment with its addresses and routes. A missing link or namespace is not an error, and
// netns may be empty.
func Del(netns string, k Key) error {
	if err := validateKey(k); err != nil {
		return nil // Add makes no such attachment
	}
	fail := func(err error) error { return fmt.Errorf("%s: %w", k.who(), err) }
	host, err := dial(nil)
	if err != nil {
		return fail(err)
	}
	defer host.close()
	name := HostLink(k)
	switch _, err := host.do(deleteLink(name, 0)); {
	case err == nil:
		return nil
	case !errors.Is(err, unix.ENODEV):
		return fail(err)
	}
	if err := delInside(host, netns, k); err != nil {
		return fail(err)
	}
	return nil
}

// delInside removes the pod's end of a link whose host end does not have HostLink's name, since it was renamed or
// Coil made it. The host end must have the attachment's alias, or no alias and a pod's route; any other interface
// stays.
func delInside(host *conn, netns string, k Key) error {
	ns, err := openNetNS(netns)
	if errors.Is(err, ErrNoNetNS) {
		return nil
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	pod, err := dial(ns)
	if err != nil {
		return err
	}
	defer pod.close()
	inside, there, err := pod.link(getLink(k.Interface))
	if err != nil || !there || inside.kind != "veth" || inside.peer == 0 {
		return err
	}
	outside, there, err := host.link(getLinkAt(inside.peer))
	if err != nil || !there || outside.kind != "veth" || outside.peer != inside.index {
		return err
	}
	alias, ours := ParseAlias(outside.alias)
	if !ours {
		alias, ours = ParseCoilAlias(outside.alias)
	}
	ours = ours && alias.Key == k
	if !ours {
		routes, err := host.routes(defaultTable, outside.index)
		if err != nil || len(routes) == 0 || outside.alias != "" {
			return err
		}
	}
	_, err = pod.do(deleteLink(k.Interface, inside.index))
	return rtnl.Ignore(err, unix.ENODEV)
}

// Purge removes every link that has an alias of this package with the given table; 0 is the default.
func Purge(table int) error {
	c, err := dial(nil)
	if err != nil {
		return err
	}
	defer c.close()
	links, err := c.links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if a, ours := ParseAlias(l.alias); ours && a.of(table) {
			_, err := c.do(deleteLink(l.name, l.index))
			errs = append(errs, rtnl.Ignore(err, unix.ENODEV))
		}
	}
	return errors.Join(errs...)
}
