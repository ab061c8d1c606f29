// Package overlay puts mutations into builds: an Edit replaces a text of the sources, and go's -overlay builds with the
// edited copies, so that no file is touched and no program has a switch for a bug. A text that a file does not have
// exactly once is an error, so that no patch rots unseen.
//
// All functions are safe for concurrent use, with a directory of its own for each overlay.
package overlay
