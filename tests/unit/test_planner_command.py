"""`commutator plan` on the command line: what is wrong is said, and a backtest needs nothing that runs."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import commutator

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = commutator.run(["plan", *argv], {})
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("", "a planner hears routers on their NATS server: --nats nats://HOST:4222"),
        ("--nats nats://h:1 --actuator kubernetes", "drains before it stops: name each router's admin API, --router URL"),
        ("--nats nats://h:1 --actuator process --router http://h:1 --router-token t", "starts what `[[pool]]` tables describe"),
        ("--nats nats://h:1 --actuator docker --router http://h:1 --router-token t", "needs to know what it scales"),
        ("--nats nats://h:1 --router http://h:1", "ask for a token"),
        ("--nats nats://h:1 --target latency --itl-ms 10", "has no effect with target 'latency'"),
        ("--nats nats://h:1 --decode-up 0.5", "has no effect with target 'sla'; only 'load' reads it"),
        ("--nats nats://h:1 --prefill-min 2", "has no effect with mode 'aggregated'"),
        ("--nats nats://h:1 --aggregated-min 9", "is less than `aggregated.min`, 9"),
        ("--nats nats://h:1 --webhook http://h", "has no effect without actuator `virtual`"),
        ("--nats nats://h:1 --backtest-plot x.svg", "has no effect without backtest"),
        (
            '--nats nats://h:1 --actuator process --router http://h:1 --router-token t --pool {"name":"a","engine":"simulated","replicas":0}',
            "begins with its `replicas`, 0, which is less than `aggregated.min`, 1: change one of them, or leave `replicas` out",
        ),
        (
            '--nats nats://h:1 --actuator process --router http://h:1 --router-token t --pool {"name":"a","engine":"simulated","replicas":9}',
            "begins with its `replicas`, 9, which is more than `aggregated.max`, 8",
        ),
        ("--nats nats://h:1 --aggregated-target llm/engine", "has no effect without actuator `docker` or `kubernetes`"),
        ("--nats nats://h:1 --loops load --predictor kalman", "has no effect with loops 'load'"),
        ("--nats nats://h:1 --zero-after-s 60", "has no effect where no pool may be emptied: `aggregated.min` is not 0"),
        ("--nats nats://h:1 --target latency --profile profile.json", "has no effect with target 'latency'"),
        ("--nats nats://h:1 --log-folder logs", "has no effect without actuator `process`"),
        ("--nats nats://h:1 --drain-s 5", "has no effect with actuator `dry-run`, which stops nothing"),
        ("--nats nats://h:1 --target load --decode-up 0.3", "0.4 is not less than `decode_up`, 0.3"),
        ("--backtest /nowhere.jsonl", "/nowhere.jsonl: No such file"),
        ("--nats nats://h:1 --profile /nowhere.json", "/nowhere.json cannot be read"),
    ],
)
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], argv: str, complaint: str) -> None:
    code, out, err = said(capsys, *argv.split())
    assert code in (1, 2)
    assert out == ""
    assert complaint in err


def test_a_backtest_ranks_predictors_and_draws_what_came_and_what_was_expected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    draw, at, trace = random.Random(2), 0.0, tmp_path / "trace.jsonl"
    lines = []
    while at < 3 * 3600:
        at += draw.expovariate(0.2 + 0.15 * math.sin(2 * math.pi * at / 5400) + at / 20_000)
        lines.append(json.dumps({"timestamp": at * 1e3, "input_length": 10, "output_length": 5}))
    trace.write_text("\n".join(lines))
    picture = tmp_path / "plot.svg"
    code, out, err = said(capsys, "--backtest", str(trace), "--backtest-plot", str(picture), "--predictor", "kalman")
    assert (code, err) == (0, "")
    rows = [line for line in out.splitlines() if "%" in line]
    assert {row.split()[0] for row in rows} >= {"constant", "moving-average", "holt", "daily", "weekly", "kalman"}
    assert next(row for row in rows if "(chosen)" in row).startswith("kalman")
    errors = [float(row.split()[1].rstrip("%")) for row in rows]
    assert errors == sorted(errors)
    root = ET.fromstring(picture.read_text())  # noqa: S314  our own
    drawn = [line for line in root.iter() if line.tag.endswith("polyline")]
    assert len(drawn) >= 2
    assert all(line.attrib["points"].count(",") > 100 for line in drawn)


def test_a_trace_that_is_none_is_refused_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"time": 1}\n')
    code, _, err = said(capsys, "--backtest", str(trace))
    assert code == 1
    assert "is not an object with `timestamp`" in err
