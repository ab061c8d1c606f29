package dataplane

// FoUPorts are the UDP ports of an egress's tunnels. While a cluster changes the port there are two: both ends take
// what comes to either, and send to the former one until everybody is sure to take the next.
type FoUPorts struct {
	Send uint16 // that packets are sent to, and from; 0: FoUPort
	Also uint16 // at which packets are taken, too; 0: none
	Gone uint16 // of before the last change, at which nothing is taken any more; 0: there was none
}

// To is the port that packets are sent to.
func (p FoUPorts) To() uint16 {
	if p.Send == 0 {
		return FoUPort
	}
	return p.Send
}

// Taken are the ports at which packets are taken, the one that packets are sent to first.
func (p FoUPorts) Taken() []uint16 {
	if p.Also == 0 || p.Also == p.To() {
		return []uint16{p.To()}
	}
	return []uint16{p.To(), p.Also}
}
