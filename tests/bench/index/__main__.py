"""What do millions of cached blocks cost? Memory, matching, and following their engines end to end, beside Dynamo's own tree.

scripts/bench-index [--quick] [--engines N] [--blocks N] [--only PART …] [--json OUT]

    memory    bytes a block: one holder or eight, stored 128 at a time as a prompt is or one by one as decoding does
    tables    store, match and remove in this index and in Dynamo's (scripts/peers dynamo), in alternation, bytes in
    bus       engines' sockets → relay → NATS → mirror → index in one process, and a router that joins late in another
    direct    the same without NATS, as a router does that reads its engines itself

Each engine holds 16 heads of 32 blocks, which all hold, and chains of 128 blocks of its own behind them. A changed block is one stored or
evicted; full caches evict 32 and store 32 in a message. Processor time is user and system time of the process under test (the NATS
server's stands beside it), never of the engines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tests.bench import report
from tests.bench.contenders import peer
from tests.bench.index.chain import Found, Size
from tests.bench.index.child import child
from tests.bench.index.workload import Workload
from tests.bench.processes import BenchError

PARTS = ("memory", "tables", "bus", "direct")
TABLE = "tests.bench.index.table"
CHAIN = "tests.bench.index.chain"
KINDS = {"one holder, 128 at a time": (1, 128), "one holder, one at a time": (1, 1), "eight holders, 128 at a time": (8, 128)}
MATCHES = {"match, known to all and then to one": "warm", "match, known to nobody": "cold"}
Pair = tuple[dict[str, float], dict[str, float]]
"""Of ours, and of theirs."""
MOST_BYTES = 160
LEAST_BLOCKS_PER_S = 200_000
MOST_MATCH_US, MOST_MATCH_P99_MS = 30, 5
MOST_JOIN_S, MOST_TURN_MS = 30, 20


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench-index", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 engines of 2,560 blocks and little of everything: does it run?")
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=20_000, help="that each holds")
    parser.add_argument("--burst", type=int, default=100_000, help="messages as fast as they come")
    parser.add_argument("--per-second", type=float, default=1000.0, help="messages at a pace")
    parser.add_argument("--seconds", type=float, default=10.0, help="of them")
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help="this part; repeatable")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything that was measured there")
    options = parser.parse_args()
    if options.quick:
        options.engines, options.blocks, options.burst, options.per_second, options.seconds = 16, 2560, 1000, 200.0, 1.0
    return options


def say(text: str = "") -> None:
    """One line of what was found."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def against(value: float, limit: float, *, least: bool = False) -> str:
    """A target, and whether it was met."""
    met = value >= limit if least else value <= limit
    return f"{'≥' if least else '≤'} {limit:,g}: {'met' if met else 'missed'}"


async def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Print bytes a block."""
    blocks = options.engines * options.blocks // 2
    say(f"\n### memory: bytes a block, of {blocks:,}\n\n| | in the end | at the worst | target |\n| --- | ---: | ---: | --- |")
    found = {}
    for name, (holders, length) in KINDS.items():
        async with child(sys.executable, TABLE, "ours", 8, options.blocks) as table:
            seen = found[name] = await table.ask("hold", holders=holders, length=length, blocks=blocks)
        target = against(seen["worst_bytes"], MOST_BYTES) if holders == 1 else ""
        say(f"| {name} | {seen['bytes']:.0f} | {seen['worst_bytes']:.0f} | {target} |")
    return found


async def tables(options: argparse.Namespace) -> dict[str, Any]:
    """Print what the two tables take for the same."""
    found = await _measured(options)
    held = sum(ours["blocks"] for ours, _ in found["store"])
    say(f"\n### tables: {held:,.0f} blocks, medians of {len(found['store'])} rounds\n")
    say("| | ours | Dynamo's | ours ÷ Dynamo's | target |\n| --- | ---: | ---: | ---: | --- |")
    for what, target in {"store": 1, "evict": None}.items():
        for clock in ("wall", "cpu"):
            _row(f"{what}, {clock} µs a block", found[what], f"{clock}_us", target if clock == "wall" else None)
    for what in MATCHES:
        for clock in ("p50", "p99", "cpu"):
            _row(f"{what}, {clock} µs", found[what], f"{clock}_us", 1 if clock == "p50" else None)
    for what in ("full", "all leave"):
        mine, other = (after["rss_bytes"] - before["rss_bytes"] for after, before in zip(found[what][0], found["before"][0], strict=True))
        say(f"| memory when {what}, bytes a block stored | {mine / held:.0f} | {other / held:.0f} | ×{mine / other:.2f} | |")
    for what in ("store", "all leave"):
        say(f"| {what}: the process kept at most, ms | {max(mine['longest_ms'] for mine, _ in found[what]):.1f} | | | |")
    say(f"| a full garbage collection, ms | {found['full'][0][0]['gc_ms']:.1f} | | | |")
    return {what: [{"ours": mine, "dynamo": other} for mine, other in rounds] for what, rounds in found.items()}


async def _measured(options: argparse.Namespace) -> dict[str, list[Pair]]:
    """Ours and theirs by what was done, in rounds that take turns."""
    found: dict[str, list[Pair]] = {}
    places = options.engines, options.blocks
    rounds, prompts = (2, 100) if options.quick else (5, 1000)
    rounds = min(rounds, Workload(1, options.blocks).chains)  # each has something to store
    async with (
        child(sys.executable, TABLE, "ours", *places) as ours,
        child(peer("dynamo") / "bin/python", TABLE, "dynamo", *places) as theirs,
    ):

        async def both(what: str, do: str, **arguments: object) -> None:
            seen = {}
            for one in (ours, theirs) if len(found.get(what, ())) % 2 else (theirs, ours):
                seen[one] = await one.ask(do, **arguments)
            found.setdefault(what, []).append((seen[ours], seen[theirs]))

        await both("before", "memory")
        for part in range(rounds):
            await both("store", "store", part=part, parts=rounds)
        await both("full", "memory")
        for _ in range(rounds):
            for what, kind in MATCHES.items():
                await both(what, "match", kind=kind, count=prompts)
        for part in range(rounds):
            await both("evict", "remove", first=part, last=part + 1)
        await both("all leave", "leave")
    return found


def _row(name: str, rounds: list[Pair], column: str, target: float | None) -> None:
    ratio = statistics.median(ours[column] / theirs[column] for ours, theirs in rounds)
    ours, theirs = (statistics.median(seen[side][column] for seen in rounds) for side in (0, 1))
    digits = 2 if ours < 10 else 1
    say(f"| {name} | {ours:.{digits}f} | {theirs:.{digits}f} | ×{ratio:.2f} | {'' if target is None else against(ratio, target)} |")


async def chain(options: argparse.Namespace, *, direct: bool) -> Found:
    """Print what the whole way costs."""
    size = Size(options.engines, options.blocks, options.per_second, options.seconds, options.burst)
    async with child(sys.executable, CHAIN, "direct" if direct else "bus", msgspec.json.encode(size).decode()) as measuring:
        found: Found = msgspec.json.decode(await measuring.hear())
    say(f"\n### {'direct' if direct else 'bus'}: {size.engines} engines of {size.held:,} blocks\n")
    say("| | filling | at a pace | burst | target |\n| --- | ---: | ---: | ---: | --- |")
    phases = [found[name] for name in ("fill", "steady", "burst")]
    for name, column, limit, least in (
        ("blocks changed", "blocks", None, False),
        ("a second", "blocks_per_s", None, False),
        ("a second of this process's processor time", "blocks_per_cpu_s", LEAST_BLOCKS_PER_S, True),
        ("µs a block, this process", "cpu_us", None, False),
        ("µs a block, the NATS server", "server_us", None, False),
        ("a match of 256 blocks, p50 µs of processor time", "match_p50_us", MOST_MATCH_US, False),
        ("p99", "match_p99_us", 1000 * MOST_MATCH_P99_MS, False),
        ("the same by the clock, p50 µs", "match_wall_p50_us", None, False),
        ("p99", "match_wall_p99_us", None, False),
        ("with the wait for its turn, by the clock, p50 µs", "answer_p50_us", None, False),
        ("p99", "answer_p99_us", None, False),
        ("the loop kept, p99 µs of processor time", "turn_p99_us", None, False),
        ("at most, ms", "turn_ms", MOST_TURN_MS, False),
        ("waiting at most, by the clock, ms", "late_ms", None, False),
    ):
        values = [phase.get(column) for phase in phases]
        judged = [value for phase, value in zip(phases, values, strict=True) if value is not None and (not least or phase is not phases[1])]
        target = "" if limit is None else against(min(judged) if least else max(judged), limit, least=least)
        say(
            f"| {name} | "
            + " | ".join("" if value is None else f"{value:,.{1 if value < 1000 else 0}f}" for value in values)
            + f" | {target} |"
        )
    fill, leave = found["fill"], found["leave"]
    say(f"\nMemory: {fill['bytes']:.0f} bytes a block for all of the process, {fill['index_bytes']:.0f} of them estimated for the index.")
    say(
        f"All leave: {leave['cpu_s']:.1f} s of processor time in turns of {leave['turn_ms']:.1f} ms at most "
        f"({against(leave['turn_ms'], MOST_TURN_MS)}); {leave['entries']:.0f} entries and {leave['rss_bytes'] / 1e6:.0f} MB are left, "
        f"of {fill['before_bytes'] / 1e6:.0f} before anything was held."
    )
    if not direct:
        join = found["join"]
        say(
            f"A router that joins late, while events come, has {join['blocks']:,.0f} blocks after {join['s']:.1f} s "
            f"({against(join['s'], MOST_JOIN_S)}), {join['cpu_s']:.1f} of them of its processor; its loop is kept {join['turn_ms']:.1f} ms at most, "
            f"that of the router that answers {join['answering_turn_ms']:.1f} "
            f"({against(max(join['turn_ms'], join['answering_turn_ms']), MOST_TURN_MS)}); "
            f"{join['rss_bytes'] / join['blocks']:.0f} bytes a block."
        )
    say("Lost and mended: " + ", ".join(f"{name} {value:.0f}" for name, value in found["faults"].items()) + ".")
    return found


async def bench(options: argparse.Namespace) -> None:
    """Run the parts; print a table after each."""
    where = report.conditions()
    say(report.described(where))
    found: dict[str, Any] = {}
    for part in options.only or PARTS:
        match part:
            case "memory":
                found[part] = await memory(options)
            case "tables":
                try:
                    found[part] = await tables(options)
                except BenchError as error:
                    if "not installed" not in str(error):
                        raise
                    say(f"\n### tables: left out, {error}")
            case "bus" | "direct":
                found[part] = await chain(options, direct=part == "direct")
            case _:
                pass
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"conditions": where, "parts": found})))


def main() -> None:
    """The command."""
    try:
        uvloop.run(bench(read_arguments()))
    except* BenchError as group:
        sys.exit(f"bench-index: {group.exceptions[0]}")


if __name__ == "__main__":
    main()
