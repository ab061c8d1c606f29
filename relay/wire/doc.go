// Package wire is what a relay and its clients say to each other: frames and their coding, the queue of what is to be
// sent, the windows of those who read slowly, and the datagrams by which a client proves where its UDP comes from.
//
// The Append functions append a whole frame. The Decode functions take the body of a frame whose header ParseHeader,
// a FrameReader or ReadFrame has accepted, and so check no lengths.
//
// What always holds:
//   - No reader ever waits for a slow destination: each destination has a bounded queue that drops its oldest packets,
//     and senders share it fairly.
//   - Control frames leave before packets, and packets of the control net before WireGuard's.
//
// All exported methods may be called concurrently, but those of a FrameReader, and Conn.Read, which belong to the
// reader of a session. The frames are in relay/DESIGN.md, with the reasons; sources are DESIGN.md sections 7, 8 and 13
// of the project.
package wire
