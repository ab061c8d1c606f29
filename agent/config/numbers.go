package config

import (
	"errors"
	"fmt"

	"github.com/skeinmesh/skein/dataplane"
)

// Between the ports of one instance and the next.
const (
	instancePorts      = 10
	instanceRelayPorts = 5000
)

// DefaultOf is the configuration of a host's i-th agent that says nothing else, from 0 to dataplane.MaxInstance:
// numbers in the kernel and ports are others than those of the other instances.
func DefaultOf(i int) Config {
	c := Default()
	c.Dataplane.Instance = uint8(i)
	c.Dataplane.setNumbers(dataplane.NumbersOf(i))
	p := &c.Ports
	for _, port := range []*uint16{&p.WireGuard, &p.Stun, &p.Relay, &p.Plain} {
		*port += uint16(instancePorts * i)
	}
	p.Metrics = fmt.Sprintf("127.0.0.1:%d", 9469+instancePorts*i)
	p.UDPRelay = fmt.Sprintf("%d-%d", 24000-instanceRelayPorts*i, 28999-instanceRelayPorts*i)
	return c
}

// setNumbers fills the keys from numbers.
func (d *Dataplane) setNumbers(n dataplane.Numbers) {
	d.Link, d.HopLink, d.PlainLink, d.NftTable = n.Link, n.HopLink, n.PlainLink, n.NftTable
	d.Mark, d.TunnelMark, d.MarkMask = n.MarkWG, n.MarkRoute, n.MarkMask
	d.Rule, d.FirstRule, d.Table, d.FirstTable = n.RulePriority, n.FirstRule, n.RouteTable, n.FirstTable
}

// Numbers are the names and numbers in the kernel that the keys give.
func (d Dataplane) Numbers() dataplane.Numbers {
	n := dataplane.NumbersOf(int(d.Instance)).WithNftTable(d.NftTable)
	n.Link, n.HopLink, n.PlainLink = d.Link, d.HopLink, d.PlainLink
	n.MarkWG, n.MarkRoute, n.MarkMask = d.Mark, d.TunnelMark, d.MarkMask
	n.RulePriority, n.FirstRule, n.RouteTable, n.FirstTable = d.Rule, d.FirstRule, d.Table, d.FirstTable
	return n
}

// numberKeys are the keys by the names of the fields of dataplane.Numbers.
var numberKeys = map[string]string{
	"Link": "link", "HopLink": "hopLink", "PlainLink": "plainLink", "NftTable": "nftTable", "MarkWG": "mark",
	"MarkRoute": "tunnelMark",
	"MarkMask":  "markMask", "RulePriority": "rule", "FirstRule": "firstRule", "RouteTable": "table",
	"FirstTable": "firstTable",
}

func (c *Config) checkNumbers() error {
	if err := c.checkInstance(); err != nil {
		return err
	}
	err := c.Dataplane.Numbers().Check()
	var n *dataplane.ErrNumbers
	if errors.As(err, &n) {
		return wrong("dataplane."+numberKeys[n.Field], "%s", n.Problem)
	}
	return err
}

func (c *Config) checkInstance() error {
	if c.Dataplane.Instance > dataplane.MaxInstance {
		return wrong("dataplane.instance", "%d is not allowed; want 0 to %d; for more agents, leave it 0 and set the "+
			"key of each number",
			c.Dataplane.Instance, dataplane.MaxInstance)
	}
	return nil
}
