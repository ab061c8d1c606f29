# SCHEDULES of seeded faults, and an observer that looks for an egress slot with two owners: about 6 s each. SEED repeats a
# run; WRITE=docs/egress-proof.md keeps the report.
SCHEDULES ?= 200
.PHONY: owners owners-mutated owners-planted owners-kernel
owners: setup build-dev
	bin/skein-dev owners --schedules $(SCHEDULES) $(if $(SEED),--seed $(SEED)) $(if $(WRITE),--write $(WRITE))

# The same with agents whose kernel counts leases five times too long, built for this alone: fails unless that is found.
owners-mutated: setup build-dev
	bin/skein-dev owners --mutation long-lease --schedules $(SCHEDULES) $(if $(SEED),--seed $(SEED))

owners-planted: owners-mutated # its former name

# The same with kernel WireGuard and FoU and a smaller mesh; in the test guest, where it runs if this kernel lacks them, also with
# the wall clock turned. About 30 s each there.
owners-kernel: setup build-dev
	.ci/kernel-tier -owners $(SCHEDULES) -timeout 4h
