package consensus

import (
	"reflect"
	"testing"
)

// A future that the library forgets when it shuts down keeps no goroutine: it ends with Raft. The test fails when the
// library's futures have no such channel any more.
func TestForgottenFuturesEnd(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		stopped := make(chan struct{})
		for _, f := range []interface{ Error() error }{c.leader().raft.raft.Barrier(0), c.leader().raft.raft.VerifyLeader()} {
			endAtShutdown(f, stopped)
			if end := reflect.ValueOf(f).Elem().FieldByName("ShutdownCh"); !end.IsValid() || end.IsNil() {
				t.Errorf("a %T does not end with Raft", f)
			}
			if err := f.Error(); err != nil {
				t.Error(err)
			}
		}
		endAtShutdown(nil, stopped) // and whatever has no such channel
	})
}
