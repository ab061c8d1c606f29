package ipam

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// report adds the median and the 99th percentile of single runs, in microseconds.
func report(b *testing.B, all []time.Duration) {
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(all[len(all)*99/100].Nanoseconds())/1e3, "p99-µs")
}

// BenchmarkAssign assigns an address from a held block, recorded so that kill -9 loses nothing.
func BenchmarkAssign(b *testing.B) {
	for _, blocks := range []int{4, 64} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			g := newAgreement(b, time.Now)
			g.pool(poolOf("default", 5, "10.64.0.0/16", "fd02::/112"))
			r := g.start("a", func(c *Config) { c.Now, c.OnEvent = nil, nil })
			for range (blocks - 1) * 32 {
				r.assign("there")
			}
			r.assign("one of the next block")
			ctx := context.Background()
			all := make([]time.Duration, 0, b.N)
			for b.Loop() {
				req := r.request("p")
				begin := time.Now()
				l, err := r.Assign(ctx, req)
				all = append(all, time.Since(begin))
				if err != nil {
					b.Fatal(err)
				}
				r.Release(l.Key, "")
			}
			report(b, all)
		})
	}
}

func benchRecord(i int) record {
	r := giveRecord(Lease{Network: "skein", Pool: "default", Attachment: podnet.Attachment{
		Key: podnet.Key{ContainerID: fmt.Sprintf("%064d", i), Interface: "eth0"}, Namespace: "kube-system",
		Pod: "coredns-5d78c9869d-abcde", NetNS: "/var/run/netns/cni-0d4c3f0e-3c6b-7c2e-8a5f-1f2e3d4c5b6a"}})
	return moment{at: time.Now(), up: 1e12}.stamp(r)
}

// BenchmarkFile writes one record to the file format that was chosen, and to the alternative (bbolt).
func BenchmarkFile(b *testing.B) {
	b.Run("append", func(b *testing.B) {
		f := newFile(filepath.Join(b.TempDir(), "ipam.db"))
		if err := f.rewrite(nil); err != nil {
			b.Fatal(err)
		}
		var all []time.Duration
		for i := 0; b.Loop(); i++ {
			r := benchRecord(i % 500)
			begin := time.Now()
			if err := f.append(r); err != nil {
				b.Fatal(err)
			}
			all = append(all, time.Since(begin))
		}
		report(b, all)
	})
	b.Run("bbolt", func(b *testing.B) {
		db, err := bbolt.Open(filepath.Join(b.TempDir(), "ipam.db"), 0o600, &bbolt.Options{NoSync: true, NoFreelistSync: true,
			FreelistType: bbolt.FreelistMapType})
		if err != nil {
			b.Fatal(err)
		}
		defer db.Close()
		var all []time.Duration
		for i := 0; b.Loop(); i++ {
			r := benchRecord(i % 500)
			begin := time.Now()
			err := db.Update(func(tx *bbolt.Tx) error {
				bucket, err := tx.CreateBucketIfNotExists([]byte("leases"))
				if err != nil {
					return err
				}
				v, err := json.Marshal(r)
				if err != nil {
					return err
				}
				return bucket.Put([]byte(r.Container), v)
			})
			if err != nil {
				b.Fatal(err)
			}
			all = append(all, time.Since(begin))
		}
		report(b, all)
	})
}

// BenchmarkOpen500 opens the file of a node with 500 pods and as many past ones, and adopts the kernel's addresses.
func BenchmarkOpen500(b *testing.B) {
	g := newAgreement(b, time.Now)
	g.pool(poolOf("default", 5, "10.64.0.0/16", "fd02::/112"))
	r := g.start("a", func(c *Config) { c.Now, c.OnEvent = nil, nil })
	for range 500 {
		r.Release(r.assign("before").Key, "")
		r.assign("there")
	}
	kernel := found(r.Leases()...)
	for b.Loop() {
		m, _, err := Open(r.cfg)
		if err != nil {
			b.Fatal(err)
		}
		m.Follow(g.state)
		m.Adopt(kernel)
		if len(m.Leases()) != 500 {
			b.Fatal(len(m.Leases()))
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
