// Package planlog keeps the plans that an agent has followed: for each, when it came and from which agreed state, and
// its text byte for byte. On disk a plan is what it changed in the one before, and now and then the whole text,
// deflated, from which the next ones go on. The oldest go when the file has its size.
//
// All methods are safe for concurrent use.
package planlog
