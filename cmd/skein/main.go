// Command skein is the agent, the relay, the command line and the lab.
package main

func main() {}
