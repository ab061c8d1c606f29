package egressns

import (
	"errors"
	"fmt"
	"os"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// table reads and writes this package's table in one network namespace.
type table struct {
	*nftable.Conn
	hold hold.Form
}

func openTable(ns int) (*table, error) {
	c, err := nftable.Open(ns)
	if err != nil {
		return nil, err
	}
	return &table{Conn: c, hold: hold.Native}, nil
}

// probeHold finds the form in which this kernel can hold packets. It tries each in a table that no packet meets.
func (t *table) probeHold() error {
	for _, h := range hold.Forms() {
		x := &nftables.Table{Name: tableName + "_trial", Family: nftables.TableFamilyINet}
		t.Nft().AddTable(x)
		pr := nftables.ChainPriority(*nftables.ChainPriorityRaw)
		c := t.Nft().AddChain(&nftables.Chain{Table: x, Name: "trial", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: &pr})
		t.Nft().AddRule(&nftables.Rule{Table: x, Chain: c, Exprs: one(0, iif("none/"), queue(h)).Exprs})
		t.Nft().DelTable(x)
		err := t.Nft().Flush()
		if err == nil {
			t.hold = h
			return nil
		}
		if err := t.Renew(); err != nil {
			return err
		}
		if errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("writing nftables: %w: this needs CAP_NET_ADMIN", err)
		}
	}
	t.hold = holdNot
	return nil
}

func (t *table) read() (nftable.State, error) { return t.Read(layout(t.hold)) }

func (t *table) write(ops []nftable.Op) (int, error) { return t.Write(layout(t.hold), ops) }
