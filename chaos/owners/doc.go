// Package owners shows that an egress slot never forwards in two places. An observer in the namespace of a host outside
// the mesh captures what comes from the slots; seeded faults hit gateways and servers; a pure judge compares, packet by
// packet, who sent it with who was given the slot by the event log.
//
// Judge, Decode and World.Plan are pure. A Capture owns its socket and a goroutine; its methods may be called
// concurrently.
package owners
