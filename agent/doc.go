// Package agent is the daemon: it wires agreed state (consensus), observed state (gossip), paths,
// relays and the data plane together, and serves the local API.
//
// One goroutine, loop, owns what the agent decides: it reads the newest State, Records and Paths,
// projects them and applies the Spec. Everything else only wakes it. So a missed wake-up costs time
// and never correctness, and the order of events does not matter.
package agent
