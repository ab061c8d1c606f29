// Package journal keeps what an agent observed and decided, in a bounded file on its disk, so that
// explain can answer for the past and a path seen in the field can be replayed in a test.
//
// Append never waits for the disk: entries gather in memory and go out in one transaction per
// interval, so a crash loses at most that interval and never damages what was written. The oldest
// entries leave as new ones come. A file that cannot be read is an error that names it and says
// how to go on; nothing is deleted. Memory gives the same without a file.
//
// All methods are safe for concurrent use. Entries are immutable once appended.
//
// Source: DESIGN.md section 3.
package journal
