// Package export tests what DESIGN.md promises of table 119: that a routing daemon can read this host's blocks there
// and announce them. It holds no code of its own; docs/routing-export.md shows the configuration that the test runs.
package export
