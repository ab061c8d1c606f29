package resource

import "testing"

// A pool that says nothing of the size of its blocks has blocks of 32 addresses: /27 and /123.
func TestBlocksHave32Addresses(t *testing.T) {
	p := AddressPool{Meta: Meta{Name: "default", UID: "u", Generation: 1, Finalizers: []string{Finalizer}},
		Spec: AddressPoolSpec{Subnets: []Subnet{{IPv4: "10.64.0.0/24", IPv6: "fd64::/120"}}}}
	l := newLog(t)
	l.settle(&p.Observed, func() Decision { return Pool(l.State, p) })
	if have := l.State.Pool("default").GetBlockSizeBits(); have != 5 {
		t.Errorf("blocks of 2^%d addresses", have)
	}
}
