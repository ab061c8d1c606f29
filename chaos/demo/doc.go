// Package demo is the main job, shown: it raises a mesh of real agents behind real NATs, lets it go
// through what networks do to it, and checks every claim. It is what `make demo` runs.
package demo
