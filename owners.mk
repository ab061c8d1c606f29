# SCHEDULES of seeded faults, and an observer that looks for an egress slot with two owners: about 6 s each. SEED repeats a
# run; WRITE=docs/egress-proof.md keeps the report.
SCHEDULES ?= 200
.PHONY: owners
owners: setup build
	bin/skein lab owners --schedules $(SCHEDULES) $(if $(SEED),--seed $(SEED)) $(if $(WRITE),--write $(WRITE))
