// Package service runs the shipped systemd unit, deploy/skein.service, and its drop-ins under a real systemd: a small
// Debian in a container, with a network of its own that leads to a second agent. It is a test; .ci/systemd makes the
// Debian and runs it.
package service
