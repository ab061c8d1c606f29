# Every figure that is promised, measured, beside its target. WRITE=docs/bench.md keeps the table; BENCH_FLAGS go
# to `skein-dev bench`, for instance --quick (three minutes) or --only memory.
# `BENCH_FLAGS="--only sites --faults killed --runs 30"` takes single faults of leaders of sites.
BENCH_FLAGS ?=

.PHONY: bench
bench: build-dev
	.ci/setup bench
	bin/skein-dev bench $(if $(WRITE),--write $(WRITE)) $(BENCH_FLAGS)
