package redteam

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/chaos/lab/ping"
)

const (
	pairPort  = 9
	pairSize  = 1000                 // bytes of each packet
	pairEvery = 4 * time.Millisecond // 2 Mb/s each way
	// pairPatience is for one echo; later it counts as lost.
	pairPatience = time.Second
)

// Cost is how the honest pair fared for a while: packets of a steady stream that came back, and how late.
type Cost struct {
	Sent    int           `json:"sent"`
	Lost    int           `json:"lost"`
	Median  time.Duration `json:"median_nanos"`
	P99     time.Duration `json:"p99_nanos"`
	Longest time.Duration `json:"longest_nanos"` // that nothing came back
}

// Loss is the share of packets that were lost, 0 to 1.
func (c Cost) Loss() float64 {
	if c.Sent == 0 {
		return 1
	}
	return float64(c.Lost) / float64(c.Sent)
}

// beside measures the pair while something goes on. It sends from a node to a UDP echo on another.
func beside(ctx context.Context, ns string, to netip.Addr, during func() error) (Cost, error) {
	c, err := dialUDP(ns, netip.AddrPortFrom(to, pairPort))
	if err != nil {
		return Cost{}, err
	}
	var mu sync.Mutex
	var tally ping.Tally
	var all sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	all.Go(func() {
		b := make([]byte, 2*pairSize)
		for {
			n, err := c.Read(b)
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil || n < 8:
				continue
			}
			mu.Lock()
			tally.Received(int(binary.BigEndian.Uint64(b)), time.Now())
			mu.Unlock()
		}
	})
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		b := make([]byte, pairSize)
		tick := time.NewTicker(pairEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			mu.Lock()
			n := tally.Sent(time.Now())
			mu.Unlock()
			binary.BigEndian.PutUint64(b, uint64(n))
			_, _ = c.Write(b) // what the kernel refuses is lost, and the tally says so
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	}()
	err = during()
	stop()
	<-sent
	pause.For(context.WithoutCancel(ctx), pairPatience)
	c.Close()
	all.Wait()
	r := tally.Report(time.Now(), 0)
	return Cost{Sent: r.Sent, Lost: r.Lost(), Median: r.Median, P99: r.P99, Longest: r.Longest()}, err
}
