package path

import "time"

// Heartbeats on a direct path that carries traffic. In the worst case a cut is noticed after one interval until the
// first lost ping plus deadAfter: 720 ms. That leaves 30 ms for the switch within the promised 750 ms, and on a busy
// machine 280 ms within a second.
const (
	heartbeat = 220 * time.Millisecond
	deadAfter = 500 * time.Millisecond // age of the oldest unanswered ping
	// interval once an answer is overdue: about ten pings before giving up, so that 5 % loss each way kills no path
	// (overduePace)
	fastHeartbeat = 50 * time.Millisecond
	// overdue pings that a death also requires: a process that slept through deadAfter has sent fewer, and tries again
	deadMissed   = 4
	controlQuiet = 2 * time.Second        // silence of the control net after which a ping checks the path
	lateIgnored  = 100 * time.Millisecond // lateness of this process up to which timeouts stay unchanged
	// replaces deadAfter when the peer's punch shows that the peer has lost the path: the peer has waited already
	verifyPatience = 250 * time.Millisecond
	// how long traffic counts as present: three readings of the counters, so that a lone packet causes few heartbeats
	busyFor   = 750 * time.Millisecond
	watchFor  = 3 * time.Second // heartbeats on a new path, with or without traffic
	verifyFor = time.Second     // heartbeats without traffic after a hint that the path may have changed
)

// Idle direct paths.
const (
	// below the 30 s that the shortest common UDP mapping lives (RFC 4787 asks for 120 s)
	idleKeepalive = 25 * time.Second
	idleRetry     = 200 * time.Millisecond // between quick retries after an unanswered keepalive
	idleRetries   = 3
)

// Paths whose peer has no agent.
const (
	verdictIn       = 80 * time.Millisecond   // between the last reading of the counters and a death
	silentHeartbeat = time.Second             // between pings, with traffic
	muteAfter       = 1500 * time.Millisecond // sending and receiving nothing: tolerates one lost ping
	unheardFor      = 3 * time.Second         // receiving nothing, while a relay reports a session of the peer
	agentQuiet      = 2 * time.Second         // silence of an agent that relays, too, call absent
	agentGone       = 3 * retryDown           // silence of an agent that no relay has reported on
	awaySoon        = 3 * time.Second         // since a direct path's death: an absent peer's endpoint returns at once
	awayAfter       = time.Second             // otherwise after this absence: shorter ones are session renewals
)

// How much sooner a ping may be sent so that it shares a wake-up with others.
const (
	heartbeatEarly = 110 * time.Millisecond
	keepaliveEarly = 50 // this fraction of the keepalive: half a second of 25 s
	togetherMax    = 64 // at most so many early pings per wake-up: their answers arrive together, too
)

// Waiting for an answer (RFC 6298; the floors suit a machine with two busy cores).
const (
	rtoMin     = 80 * time.Millisecond
	rtoMax     = 3 * time.Second
	rttLimit   = 10 * time.Second       // an older answer says nothing about the present
	lateWindow = 3 * time.Second        // an answer this soon after the death shows that the path was slow, not dead
	slackFirst = 250 * time.Millisecond // how far one late answer extends deadAfter: detection stays within a second
	// limit after several late answers, each of which doubles the extension: a machine that slow cannot detect within a
	// second in any case
	slackMax = 3 * time.Second
	slackFor = time.Minute // how long each extension lasts; at most five add up
)

// Suspecting a peer whose traffic others can carry.
const (
	// age of the oldest unanswered ping: a peer that stands still for 300 ms, as busy hosts do, is not suspected
	suspectAfter = 350 * time.Millisecond
	stallIgnored = 20 * time.Millisecond // lateness that every process shows now and then
	trustFirst   = 10 * time.Second      // after an answer cleared it; the agent avoids the peer as long
	trustMax     = 2 * time.Minute
)

// Damping: a path that dies again and again comes back after 1, 2, 4 … 60 s.
const (
	holdFirst  = time.Second
	holdMax    = time.Minute
	calmAfter  = 2 * time.Minute // a path that lived this long has its earlier deaths forgotten
	holdStreak = 3               // answers in a row before a path that died is trusted again
	streakGap  = 5 * time.Second // answers further apart than this are not in a row
)

// Probing.
const (
	directRetry  = 120 * time.Second      // setting directRetryIntervalSeconds
	retryFirst   = 5 * time.Second        // after a burst without an answer: 5, 10, 20 … s up to directRetry
	retryDown    = 10 * time.Second       // limit while there is no path at all
	retryAway    = 10 * time.Minute       // in a large mesh, for a peer without traffic that relays call absent
	punchGap     = time.Second            // between two punches to one peer, and between two bursts they cause
	pingBackGap  = 50 * time.Millisecond  // between two pings that answer the peer's pings
	trustAnswer  = 2 * time.Second        // an endpoint that answered this recently needs no ping in return
	sameIPOthers = 350 * time.Millisecond // head start of the LAN behind a shared public address

	windowFor   = 10 * time.Second // window for an endpoint that has answered before and does not now:
	windowPings = 14               // at most this many pings per window, which is two bursts
	learnedFor  = 2 * time.Minute  // how long a learned address and its budget are remembered
	provenFor   = 10 * time.Minute // how long an answer proves that the address is the peer's
	learnedMax  = 16               // learned addresses per peer at a time
	targetsMax  = 16               // candidates probed of one record
	punchMax    = 16               // addresses in one punch
	pendingMax  = 64               // unanswered pings remembered on the path in use
)

// Choosing between direct endpoints that work.
const (
	betterBy     = 5 * time.Millisecond  // required improvement of the RTT; also at least a fifth of the present RTT
	hostHandicap = 10 * time.Millisecond // the LAN is kept up to 1.5 times the other's RTT plus this
)

// pacing holds the send times of a burst's pings to an endpoint that has answered before. The first are close
// together because the peer's punch arrives within a relay's round trip; the last covers a slow signal.
var pacing = [...]time.Duration{
	0, 50 * time.Millisecond, 150 * time.Millisecond, 350 * time.Millisecond,
	750 * time.Millisecond, 1500 * time.Millisecond, 2500 * time.Millisecond,
}

// firstPacing is the same for an address that has never answered. The first ping opens the NAT; the others allow for
// loss and for a peer whose punch or burst comes later.
var firstPacing = [unprovenPings]time.Duration{0, 200 * time.Millisecond, time.Second}

// burstFor is how long a burst can bring answers.
const burstFor = 3500 * time.Millisecond
