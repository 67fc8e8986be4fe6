# make run                              two simulated engines and the router in front of them
# make run ENGINES="http://… http://…"  the router in front of engines that run already
# make test                             the whole suite
# make check                            style, types, import rules, generated docs
.PHONY: run test check

run:
	@scripts/setup
	@.venv/bin/python scripts/run $(ENGINES)

test:
	@scripts/setup
	@scripts/test

check:
	@scripts/setup
	@scripts/check
