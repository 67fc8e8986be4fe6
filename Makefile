# make run                              two simulated engines and the router in front of them
# make run ENGINES="http://… http://…"  the router in front of engines that run already
# make run PORT=0                       on a port that is free, instead of 8080
# make test                             the whole suite
# make check                            style, types, import rules, generated docs
# make coverage                         branch coverage of what runs without real engines
.PHONY: run test check coverage

run:
	@scripts/setup
	@.venv/bin/python scripts/run $(if $(PORT),--port $(PORT)) $(ENGINES)

test:
	@scripts/setup
	@scripts/test

check:
	@scripts/setup
	@scripts/check

coverage:
	@scripts/setup
	@.venv/bin/coverage run -m pytest -m "not real_engine"
	@.venv/bin/coverage report --skip-covered --show-missing
