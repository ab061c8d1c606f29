package service

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// docs/security.md promises the figures that TestService holds.
func TestExposureIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("rates the exposure of the service at %.1f (of 10), with the drop-in for pods at %.1f and with "+
		"the one for egresses at %.1f;",
		unitExposure, podsExposure, egressExposure)
	if !strings.Contains(strings.Join(strings.Fields(string(text)), " "), want) {
		t.Errorf("docs/security.md does not say %q", want)
	}
}
