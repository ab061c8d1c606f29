// Package timetravel checks that what skein tells of the past is what it said then: its test raises a mesh, breaks and
// repairs it without pause, notes what `skein plan` says at random moments, and asks for all of them later.
package timetravel
