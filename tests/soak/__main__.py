"""python -m tests.soak: see `scripts/soak`."""

# ruff: noqa: T201 - it speaks to a terminal

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.soak.run import soak


def main() -> int:
    """1 when something was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="An hour of everything that can go wrong, against simulated engines.")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.2, help="between two requests of one of twelve clients, on the mean")
    parser.add_argument("--report", type=Path, help="file to write what was found to, as Markdown")
    options = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # that clients of its engines leave is what this is about
    with tempfile.TemporaryDirectory(prefix="commutator-soak-") as folder:
        report = uvloop.run(soak(options.seconds, options.seed, Path(folder), pause_s=options.pause_s))
        page = report.page(f"scripts/soak --seconds {options.seconds:g} --seed {options.seed}")
        if report.complaints:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-4000:]}", file=sys.stderr)
    print(page)
    if options.report is not None:
        options.report.write_text(page, encoding="utf-8")
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
