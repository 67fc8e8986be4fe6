"""Compare the router with others, under one load, in one run, in alternation.

scripts/bench [--quick] [--only ROW …] [--rounds N] [--seconds S] [--json OUT]

Needs the peers (scripts/peers installs them) and wrk. Rows: proxy, stream, first-byte, kv, kv-shared, real, processes, processes-kv;
docs/benchmarks.md says what each is and what it does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from tests.bench import report, rows
from tests.bench.contenders import Place
from tests.bench.processes import BenchError


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of one second: does everything run?")
    parser.add_argument("--only", action="append", choices=list(rows.ROWS), metavar="ROW", help="this row; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load, in each round of each router")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every measurement of every round there")
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="leave what the programs said there")
    return parser.parse_args()


def say(text: str) -> None:
    """Progress, beside the results."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


async def bench(options: argparse.Namespace, folder: Path) -> None:
    """Run the rows; print a table after each."""
    rounds, seconds = (1, 1.0) if options.quick else (options.rounds, options.seconds)
    where = report.conditions()
    sys.stdout.write(f"{report.described(where)}\n{rounds} rounds of {seconds:g} s each\n")
    results = {}
    for name in options.only or rows.ROWS:
        row = rows.ROWS[name]
        async with row.upstream(folder) as engines, aiohttp.ClientSession() as client:
            results[name] = await rows.run(row, Place(folder, engines, client), rounds, seconds, say)
        sys.stdout.write(f"\n{report.table(row, results[name])}\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"conditions": where, "rows": results})))


def main() -> None:
    """The command."""
    options = read_arguments()
    if shutil.which("wrk") is None:
        sys.exit("bench: the load generator wrk is missing; on Debian and Ubuntu: apt-get install wrk")
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = options.keep_logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            asyncio.run(bench(options, folder))
        except* BenchError as group:
            sys.exit(f"bench: {group.exceptions[0]}")


if __name__ == "__main__":
    main()
