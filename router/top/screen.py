"""How does the document look in a terminal? Pure: a document in, something that rich can draw out.

Names come from outside. They are drawn as text, never as markup, and what is no printable character is not sent to the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

MISSING: Final = "–"
BARS: Final = " ▁▂▃▄▅▆▇█"
STYLES: Final = {
    "serving": "green",
    "live": "green",
    "waiting": "red",
    "ejected": "red",
    "mismatch": "red",
    "error": "bold red",
    "warning": "yellow",
    "note": "blue",
}
DECISIONS: Final = 10


def screen(state: Mapping[str, Any], note: str = "") -> RenderableType:
    """The whole of it; `note` goes on top."""
    parts: list[RenderableType] = [_title(state, note), *_troubles(state["troubles"]), Text(), _numbers(state), _latency(state["latency"])]
    parts += [Text(), _fleet(state["engines"])]
    if state["disagg"] is not None:
        parts += [Text(), _disagg(state["disagg"])]
    parts += [plan for one in state["plans"] for plan in (Text(), _plan(one))]
    if state["decisions"]:
        parts += [Text(), _decisions(state["decisions"][:DECISIONS])]
    return Group(*parts)


def printable(text: object) -> str:
    r"""What may be sent to a terminal.

    >>> printable("a\x1b[2Jb\n")
    'a�[2Jb�'
    """
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in str(text))


def seconds(value: float | None) -> str:
    """A time, short.

    >>> seconds(0.0123), seconds(2.5), seconds(None)
    ('12.3 ms', '2.5 s', '–')
    """
    if value is None:
        return MISSING
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def percent(part: float | None) -> str:
    """A share.

    >>> percent(0.666), percent(None)
    ('67 %', '–')
    """
    return MISSING if part is None else f"{part * 100:.0f} %"


def sparkline(values: Sequence[float | None]) -> str:
    """A row of bars, the highest for the largest value.

    >>> sparkline([0, 1, None, 4])
    ' ▂ █'
    """
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(" " if not value or not most else BARS[max(1, round(value / most * (len(BARS) - 1)))] for value in values)


def _title(state: Mapping[str, Any], note: str) -> Text:
    up, silent = state["processes"]["up"], len(state["processes"]["silent"])
    processes = "one process" if up + silent == 1 else f"{up} of {up + silent} processes"
    text = Text.assemble(("commutator", "bold"), f" {printable(state['version'])} · policy {printable(state['policy'])} · {processes}")
    return text.append(f"  {printable(note)}", "yellow") if note else text


def _troubles(found: Sequence[Mapping[str, str]]) -> Iterable[Text]:
    if not found:
        return [Text("All is well.", "green")]
    return [
        Text.assemble((f"{one['level']}: ", STYLES.get(one["level"], "")), printable(one["what"]), (f" {printable(one['mend'])}", "dim"))
        for one in found
    ]


def _numbers(state: Mapping[str, Any]) -> Table:
    late = state["late"]
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"{late['requests_per_s']:.1f} requests/s",
        f"{state['in_progress']} in progress, {sum(state['waiting'].values())} waiting",
        f"hit rate {percent(late['hit_rate'])} ({percent(late['expected_hit_rate'])} expected)",
        f"{late['output_tokens_per_s']:.1f} tokens/s",
        f"{late['failed']} failed, {late['shed']} answered 429, {late['left']} left",
        f"index {state['index']['blocks']:,} blocks",
    )
    return table


def _latency(latency: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    for name in ("median", "95 %", "99 %"):
        table.add_column(name, justify="right")
    table.add_column("median over ten minutes, until now", no_wrap=True)
    for name, key in (("time to first token", "ttft"), ("time between tokens", "itl")):
        series = latency[key]
        latest = [next((value for value in reversed(series[which]) if value is not None), None) for which in ("p50", "p95", "p99")]
        table.add_row(name, *map(seconds, latest), sparkline(series["p50"]))
    return table


def _fleet(engines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name, right in (
        ("engine", False),
        ("role", False),
        ("state", False),
        ("KV events", False),
        ("in flight", True),
        ("run", True),
        ("wait", True),
        ("KV", True),
        ("hits", True),
        ("blocks", True),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold" if name == "engine" else "ellipsis")
    for engine in engines:
        name, state = printable(engine["id"]), Text(printable(engine["state"]), STYLES.get(engine["state"], "yellow"))
        role = printable(engine["role"] or MISSING)
        if not engine["endpoints"]:
            table.add_row(name, role, state, printable(engine.get("waiting_for", "")), *[MISSING] * 6)
        for endpoint in engine["endpoints"]:
            load, signal = endpoint["load"], endpoint["signal"]
            table.add_row(
                name if len(engine["endpoints"]) == 1 else f"{name} rank {endpoint['rank']}",
                role,
                state,
                Text(printable(signal["state"]), STYLES.get(signal["state"], "yellow")),
                str(load["active_requests"]),
                _or_missing(load["running"]),
                _or_missing(load["waiting"]),
                percent(load["kv_usage"]),
                percent(endpoint["hit_rate"]),
                f"{endpoint['cached_blocks']['device']:,}",
            )
    return table


def _disagg(disagg: Mapping[str, Any]) -> Text:
    recent = ", ".join(f"{count} {printable(why).replace('_', ' ')}" for why, count in disagg["recent"].items()) or "none"
    transfers = ", ".join(f"{count} {printable(outcome)}" for outcome, count in disagg["transfers"].items()) or "none"
    return Text(f"prompts of decode engines ({printable(disagg['mode'])}), in ten minutes: {recent}; KV transfers: {transfers}")


def _plan(plan: Mapping[str, Any]) -> Text:
    told = ", ".join(
        f"{printable(name).replace('_', ' ')} {printable(value)}" for name, value in plan.items() if name not in ("age_s", "planner")
    )
    return Text(f"plan of {printable(plan['planner'])}, {plan['age_s']:.0f} s ago: {told}")


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("", "model", "engine", "why", "prompt", "expected", "cached", "first token", "status"):
        table.add_column(name, justify="right" if name in ("", "prompt", "expected", "cached", "first token") else "left")
    for one in decisions:
        failed = one["failure"] or one["status"] >= 400
        table.add_row(
            f"{one['age_s']:.0f} s",
            printable(one["model"]),
            printable(one["engine"]) + (f" rank {one['rank']}" if one["rank"] else ""),
            printable(one["reason"]).replace("_", " "),
            str(one["prompt_tokens"]),
            str(one["overlap_tokens"]),
            _or_missing(one["cached_tokens"]),
            seconds(one["ttft_s"]),
            Text(f"{one['status']} {printable(one['failure'])}".strip(), "red" if failed else ""),
        )
    return table


def _or_missing(value: object) -> str:
    return MISSING if value is None else str(value)
