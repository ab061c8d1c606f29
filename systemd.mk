# The shipped systemd unit under a real systemd, in a container of its own.
.PHONY: test-systemd
test-systemd: setup
	.ci/systemd
