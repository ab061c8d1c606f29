package path

import "time"

// Heartbeats on a direct path that carries traffic. The worst case for noticing a cut is one
// interval until the first lost ping plus deadAfter: 720 ms, which leaves 30 ms of the promised
// 750 for the switch, and 280 of a second for a busy machine.
const (
	heartbeat = 220 * time.Millisecond
	deadAfter = 500 * time.Millisecond // age of the oldest unanswered ping
	// pace once an answer is overdue: about ten tries before giving up, so that 5 % loss each way is no death
	// (overduePace)
	fastHeartbeat = 50 * time.Millisecond
	// overdue pings needed besides: a process that slept through deadAfter has sent fewer, and gets to try again
	deadMissed   = 4
	controlQuiet = 2 * time.Second        // the control net sends and hears nothing for so long: the path is asked
	lateIgnored  = 100 * time.Millisecond // how late this process may wake before that counts for its paths
	// instead of deadAfter, when the peer's punch says that it has no path: it has waited already
	verifyPatience = 250 * time.Millisecond
	// how long traffic counts as present: three readings of the counters, so that a lone packet costs few heartbeats
	busyFor   = 750 * time.Millisecond
	watchFor  = 3 * time.Second // heartbeats on a new path, traffic or not
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
	verdictIn       = 80 * time.Millisecond   // before a death: the last reading of the counters
	silentHeartbeat = time.Second             // between pings, with traffic
	muteAfter       = 1500 * time.Millisecond // sending without hearing anything: one ping a second may lose one
	unheardFor      = 3 * time.Second         // without hearing the peer, when a relay claims to reach it
	agentQuiet      = 2 * time.Second         // no word of an agent that relays call absent, too
	agentGone       = 3 * retryDown           // no word of an agent that relays say nothing about
	awaySoon        = 3 * time.Second         // after the death of a direct path
	awayAfter       = time.Second             // otherwise: a peer may just be renewing its session
)

// How much sooner a ping may leave when others leave, too.
const (
	heartbeatEarly = 110 * time.Millisecond
	keepaliveEarly = 50 // this part of the keepalive: half a second
	togetherMax    = 64 // so many are woken early at a time: their answers come together, too
)

// Waiting for an answer (RFC 6298 with floors that suit a machine with two busy cores).
const (
	rtoMin     = 80 * time.Millisecond
	rtoMax     = 3 * time.Second
	rttLimit   = 10 * time.Second       // an answer older than this proves nothing about now
	lateWindow = 3 * time.Second        // an answer this long after the death shows that the path was only slow
	slackFirst = 250 * time.Millisecond // how far a late answer stretches deadAfter: detection stays within a second
	// and how far several do, each twice as far: such a machine cannot hold a second anyway
	slackMax = 3 * time.Second
	slackFor = time.Minute // how long each does, five of them at most
)

// Suspecting a peer in whose place others can carry what goes through it.
const (
	stallIgnored = 20 * time.Millisecond // what any process wakes late now and then
	trustFirst   = 10 * time.Second      // after an answer has cleared it; as long as the agent goes on by others then
	trustMax     = 2 * time.Minute
)

// Damping: a path that dies again and again comes back after 1, 2, 4 … 60 s.
const (
	holdFirst  = time.Second
	holdMax    = time.Minute
	calmAfter  = 2 * time.Minute // a path that lived this long has no past
	holdStreak = 3               // answers in a row before a path that died is trusted again
	streakGap  = 5 * time.Second // answers further apart than this are not in a row
)

// Probing.
const (
	directRetry  = 120 * time.Second      // setting directRetryIntervalSeconds
	retryFirst   = 5 * time.Second        // after a burst without an answer: 5, 10, 20 … s up to directRetry
	retryDown    = 10 * time.Second       // cap while there is no path at all
	retryAway    = 10 * time.Minute       // in a large mesh, without traffic, at a peer that relays call absent
	punchGap     = time.Second            // between two punches to one peer, and between two bursts they cause
	pingBackGap  = 50 * time.Millisecond  // between two answers in kind to a peer's pings
	trustAnswer  = 2 * time.Second        // an endpoint that answered this recently needs no ping in return
	sameIPOthers = 350 * time.Millisecond // head start of the LAN behind a shared public address

	windowFor   = 10 * time.Second // an endpoint that has answered before, and does not now, gets
	windowPings = 14               // so many pings in so long: two bursts
	learnedFor  = 2 * time.Minute  // how long such an address and its spent budget are remembered
	provenFor   = 10 * time.Minute // how long an answer proves that the address is the peer's
	learnedMax  = 16               // such addresses per peer at a time
	targetsMax  = 16               // candidates probed of one record
	punchMax    = 16               // addresses in one punch
	pendingMax  = 64               // unanswered pings remembered on the path in use
)

// Choosing between direct endpoints that work.
const (
	betterBy     = 5 * time.Millisecond  // and a fifth of the present RTT
	hostHandicap = 10 * time.Millisecond // the LAN is kept unless another way is this much and half again faster
)

// pacing are the times of a burst's pings at an endpoint that has answered before. The first ones are close together
// because the peer's punch arrives within a relay's round trip; the last covers a slow signal.
var pacing = [...]time.Duration{
	0, 50 * time.Millisecond, 150 * time.Millisecond, 350 * time.Millisecond,
	750 * time.Millisecond, 1500 * time.Millisecond, 2500 * time.Millisecond,
}

// firstPacing are those for an address that has never answered. What opens a NAT is the first; the others are for loss,
// and for a peer whose signal or start takes longer.
var firstPacing = [unprovenPings]time.Duration{0, 200 * time.Millisecond, time.Second}

// burstFor is how long a burst can bring answers.
const burstFor = 3500 * time.Millisecond
