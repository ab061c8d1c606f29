// Package resolve turns host:port into addresses, and remembers what a name meant while the name service is away.
package resolve
