"""Twenty seconds of `scripts/soak`; and that its report would tell, were something wrong."""

from __future__ import annotations

import doctest
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.soak import report as reports
from tests.soak.report import Report
from tests.soak.run import soak
from tests.soak.traffic import Outcome

HOUR = Report(3600.0, 1, Counter({Outcome.WHOLE: 9}), Counter(), Counter(), [], [], 100, {"router": [(n * 15.0, 1e5) for n in range(240)]})


@pytest.mark.timeout(300)
async def test_twenty_seconds_of_everything_leave_nothing_behind(tmp_path: Path) -> None:
    report = await soak(20.0, 5, tmp_path, pause_s=0.05)
    logs = {log.name: log.read_text()[-2000:] for log in tmp_path.glob("*.log")}
    assert report.complaints == [], (report, logs)
    assert sum(report.chaos.values()) > 0
    assert report.outcomes[Outcome.CANCELLED] > 0
    assert report.checked_overlaps > 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"outcomes": Counter({Outcome.WHOLE: 9, Outcome.HUNG: 1})}, "1 requests ended without an end"),
        ({"outcomes": Counter({Outcome.WHOLE: 9, Outcome.TRUNCATED: 2})}, "2 requests ended cut short"),
        ({"outcomes": Counter()}, "no request was answered"),
        ({"left_over": ["router_active_blocks of router 0: 3"]}, "router_active_blocks"),
        ({"wrong_overlaps": ["router 0 believes 3"] * 4}, "4 of 100 overlaps are not what the engine holds: router 0"),
        ({"memory_kb": {"router": [(n * 15.0, 1e5 + 30 * n) for n in range(240)]}}, "router grows by 7200 kB an hour"),
    ],
)
def test_what_must_not_be_is_a_complaint(changed: dict[str, object], words: str) -> None:
    assert HOUR.complaints == []
    (complaint,) = msgspec.structs.replace(HOUR, **changed).complaints
    assert words in complaint
    assert complaint in msgspec.structs.replace(HOUR, **changed).page("soak")


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(reports)
    assert results.attempted > 0
    assert results.failed == 0
