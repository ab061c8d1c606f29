package kerneltest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/skeinmesh/skein/internal/pause"
)

// maxFreeze bounds what a guest may ask for.
const maxFreeze = 2 * time.Minute

// freeze stops the guest's processors for a while, by QEMU's monitor, and continues them.
func freeze(ctx context.Context, monitor string, d time.Duration) (err error) {
	if d <= 0 || d > maxFreeze {
		return fmt.Errorf("a guest asks to be frozen for %s: want up to %s", d, maxFreeze)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", monitor)
	if err != nil {
		return fmt.Errorf("QEMU's monitor: %w", err)
	}
	defer c.Close()
	in := bufio.NewScanner(c)
	if !in.Scan() { // its greeting
		return fmt.Errorf("QEMU's monitor says nothing: %w", errors.Join(in.Err(), net.ErrClosed))
	}
	do := func(command string) error {
		if _, err := fmt.Fprintf(c, `{"execute":%q}`+"\n", command); err != nil {
			return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
		}
		for in.Scan() {
			var answer struct {
				Return *json.RawMessage `json:"return"`
				Error  *json.RawMessage `json:"error"`
			}
			switch err := json.Unmarshal(in.Bytes(), &answer); {
			case err != nil:
				return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
			case answer.Error != nil:
				return fmt.Errorf("QEMU's monitor: %s: %s", command, *answer.Error)
			case answer.Return != nil:
				return nil
			} // else it tells an event
		}
		return fmt.Errorf("QEMU's monitor: %s: no answer: %w", command, errors.Join(in.Err(), net.ErrClosed))
	}
	if err := errors.Join(do("qmp_capabilities"), do("stop")); err != nil {
		return err
	}
	pause.For(ctx, d)
	return do("cont")
}

// AskFreeze asks the machine that runs this guest to freeze it, soon.
func AskFreeze(d time.Duration) error {
	console, err := os.OpenFile("/dev/console", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(console, "\n%s%s\n", Freeze, d)
	return errors.Join(err, console.Close())
}
