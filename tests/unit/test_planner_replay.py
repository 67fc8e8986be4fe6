"""`replay --planner`: the planner's policy in front of the router's own code."""

from __future__ import annotations

import pytest

import commutator

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def test_a_replay_with_the_planner_says_what_engines_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    code = commutator.run(
        ["replay", "chat", "--requests", "300", "--engines", "2", "--policies", "least-loaded", "--planner", "--startup-s", "10"], {}
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "least-loaded" in out
    told = err.splitlines()[-1]
    assert "planner, run 1:" in told
    assert float(told.partition("run 1: ")[2].split()[0]) > 0
