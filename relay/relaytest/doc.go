// Package relaytest has relays and nodes for the tests of the packages beside it.
package relaytest
