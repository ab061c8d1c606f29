package lab

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// A flow sends numbers of this size, in bytes; its server sends them back.
const flowRecord = 8

// FlowStream is a connection on which numbers leave at a steady rate and come back. Over TCP a number is late, not
// lost, as long as the connection lives. Its methods may be called concurrently.
type FlowStream struct {
	conn net.Conn
	tcp  bool
	in   io.Reader

	mu     sync.Mutex
	tally  ping.Tally
	sent   int
	got    int
	newest time.Time     // of answers
	broken error         // why a TCP connection has ended before its time
	change chan struct{} // closed and replaced at each answer

	stop    context.CancelFunc
	sending sync.WaitGroup
	reading sync.WaitGroup
}

// OpenFlow starts a flow from a place to a port that is served, over tcp or udp.
func (l *Lab) OpenFlow(ctx context.Context, from string, at netip.AddrPort, proto string,
	every time.Duration) (*FlowStream, error) {
	_, ns, err := l.place(from)
	if err != nil {
		return nil, err
	}
	c, err := dial(ctx, ns, proto, at)
	if err != nil {
		return nil, err
	}
	f := &FlowStream{conn: c, tcp: proto == "tcp", in: c, change: make(chan struct{})}
	if f.tcp {
		// The answer to this request is the stream itself: the server takes the connection over.
		if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: flow\r\n\r\n", flowPath); err != nil {
			c.Close()
			return nil, err
		}
		f.in = bufio.NewReader(c)
	}
	run, cancel := context.WithCancel(context.Background())
	f.stop = cancel
	f.sending.Go(func() { f.send(run, every) })
	f.reading.Go(f.read)
	return f, nil
}

func (f *FlowStream) send(ctx context.Context, every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for ctx.Err() == nil {
		f.mu.Lock()
		n := f.tally.Sent(time.Now())
		f.sent++
		f.mu.Unlock()
		// What a socket refuses is lost, and the tally says so.
		_, err := f.conn.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
		if err != nil && f.tcp && !errors.Is(err, net.ErrClosed) {
			f.breaks(err)
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

func (f *FlowStream) read() {
	b := make([]byte, flowRecord)
	for {
		var err error
		if f.tcp {
			_, err = io.ReadFull(f.in, b)
		} else {
			_, err = f.in.Read(b)
		}
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil && f.tcp:
			f.breaks(err)
			return
		case err != nil:
			continue // an ICMP error about an earlier packet
		}
		f.mu.Lock()
		f.newest = time.Now()
		f.tally.Received(int(binary.BigEndian.Uint64(b)), f.newest)
		f.got++
		close(f.change)
		f.change = make(chan struct{})
		f.mu.Unlock()
	}
}

func (f *FlowStream) breaks(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken == nil {
		f.broken = err
	}
}

// Broken is why a TCP connection has ended; nil: it has not.
func (f *FlowStream) Broken() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken
}

// Newest is when the last answer came.
func (f *FlowStream) Newest() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.newest
}

// Answered waits until n numbers have come back since the flow began.
func (f *FlowStream) Answered(ctx context.Context, n int) error {
	for {
		f.mu.Lock()
		got, broken, more := f.got, f.broken, f.change
		f.mu.Unlock()
		switch {
		case got >= n:
			return nil
		case broken != nil:
			return fmt.Errorf("the connection has ended: %w", broken)
		}
		select {
		case <-more:
		case <-time.After(100 * time.Millisecond): // a connection that ends tells nobody
		case <-ctx.Done():
			return fmt.Errorf("%d of %d numbers came back: %w", got, n, ctx.Err())
		}
	}
}

// Count is how many have come back.
func (f *FlowStream) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.got
}

// lateTCP is how long TCP gets to bring what is under way when a flow ends.
const lateTCP = 5 * time.Second

// Stop ends the flow, waits for what is under way, and returns the account.
func (f *FlowStream) Stop() ping.Report {
	f.stop()
	f.sending.Wait()
	patience := ping.Patience
	if f.tcp {
		patience = lateTCP
	}
	f.mu.Lock()
	sent := f.sent
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	_ = f.Answered(ctx, sent) // what has not come by then is lost
	cancel()
	f.conn.Close()
	f.reading.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tally.Report(time.Now().Add(patience), patience)
}

// flowing is a flow that goes on while other steps are done.
type flowing struct {
	from, to, proto string
	stream          flowStream
}

// flowStream is a FlowStream or a ConnectStream.
type flowStream interface {
	Answered(ctx context.Context, n int) error
	Broken() error
	Stop() ping.Report
}

// startFlow begins a flow over udp or tcp, or connections one after the other.
func (l *Lab) startFlow(ctx context.Context, from string, at netip.AddrPort, proto string,
	every time.Duration) (flowStream, error) {
	if proto == protoConnect {
		return l.Connect(from, at, every)
	}
	return l.OpenFlow(ctx, from, at, proto, every)
}

// protoConnect is what a step writes for new connections.
const protoConnect = "connect"

// StartFlows begins a flow from each place to each other, after the first numbers have come back.
func (l *Lab) StartFlows(ctx context.Context, f Flow) error {
	ctx, cancel := context.WithTimeout(ctx, firstAnswer)
	defer cancel()
	for _, from := range f.From {
		for _, to := range f.To {
			if from == to {
				continue
			}
			all, err := l.addresses(to, f.Family)
			if err == nil {
				all, err = l.common(from, all)
			}
			if err != nil {
				return err
			}
			s, err := l.startFlow(ctx, from, netip.AddrPortFrom(all[0], uint16(f.Port)), f.Proto, f.Every)
			if err != nil {
				return fmt.Errorf("from %s to %s: %w", from, to, err)
			}
			l.flows = append(l.flows, flowing{from, to, f.Proto, s})
			if err := s.Answered(ctx, 1); err != nil {
				return fmt.Errorf("from %s to %s: %w", from, to, err)
			}
		}
	}
	return nil
}

// EndFlows ends all flows, and fails when a connection has broken, or one lost more numbers than allowed (lost, -1: any
// number), or had none answered for longer than allowed (longest, 0: any time).
func (l *Lab) EndFlows(lost int, longest time.Duration) error {
	var errs []error
	for i, r := range l.endFlows() {
		f := r.flow
		text := fmt.Sprintf("%s to %s over %s: %d of %d lost, longest time without an answer %s", f.from, f.to, f.proto,
			r.Lost(), r.Sent, round(r.Longest()))
		if err := f.stream.Broken(); err != nil {
			text += fmt.Sprintf(", the connection broke: %v", err)
		}
		l.progress("flow %d: %s", i+1, text)
		if lost >= 0 && (r.Lost() > lost || f.stream.Broken() != nil) {
			errs = append(errs, fmt.Errorf("%s; allowed: %d lost", text, lost))
		}
		if longest > 0 && r.Longest() > longest {
			errs = append(errs, fmt.Errorf("%s; allowed: %s", text, longest))
		}
	}
	return errors.Join(errs...)
}

// Abandon ends the flow at once, whatever is under way.
func (f *FlowStream) Abandon() {
	f.stop()
	f.conn.Close()
	f.sending.Wait()
	f.reading.Wait()
}

type flowReport struct {
	ping.Report
	flow flowing
}

// endFlows stops them all at once.
func (l *Lab) endFlows() []flowReport {
	reports := make([]flowReport, len(l.flows))
	var wg sync.WaitGroup
	for i, f := range l.flows {
		wg.Go(func() { reports[i] = flowReport{f.stream.Stop(), f} })
	}
	wg.Wait()
	l.flows = nil
	return reports
}

func (r *reader) flow(v value) Action {
	f := Flow{Port: defaultPort, Proto: "udp", Every: defaultEvery, Lost: -1}
	ends, starts := false, false
	v.mapping(
		field{"from", func(v value) { f.From, starts = r.places(v), true }},
		field{"to", func(v value) { f.To, starts = r.places(v), true }},
		field{"port", func(v value) { f.Port, starts = v.integer(1, 65535), true }},
		field{"family", func(v value) { f.Family, starts = v.oneOf("ipv4", "ipv6"), true }},
		field{"proto", func(v value) { f.Proto, starts = v.oneOf("udp", "tcp", protoConnect), true }},
		field{"every", func(v value) { f.Every, starts = max(v.duration(), time.Millisecond), true }},
		field{"lost", func(v value) { f.Lost, ends = v.integer(0, 1000000), true }},
		field{"longest", func(v value) { f.Longest, ends = v.duration(), true }},
	)
	switch {
	case starts == ends:
		v.fail("either starts flows, with from and to, or ends them and says how many numbers may be lost: {lost: 0}, or " +
			"for how long none may come back: {longest: 1s}")
	case starts && (len(f.From) == 0 || len(f.To) == 0):
		v.fail("needs both from and to: nodes, or pods as NODE/POD")
	}
	return f
}
