"""What an engine's log says: lines as real engines wrote them."""

from __future__ import annotations

import pytest

from engines.launch import log


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("\x1b[0;36m(EngineCore pid=12)\x1b[0;0m INFO 11-30 00:49:57 [core.py:123] loaded", "loaded"),
        ("(APIServer pid=3) INFO:     Application startup complete.", "INFO:     Application startup complete."),
        ("[2026-11-30 00:49:57 TP0] Load weight begin.", "Load weight begin."),
        ("[2026-11-30 00:49:57] Scheduler hit an exception", "Scheduler hit an exception"),
        ("W1130 01:00:42.053000 5401 torch/_library/triton.py:53] Triton not available", "Triton not available"),
        ("Loading shards:   0%|  |\rLoading shards: 100%|##|", "Loading shards: 100%|##|"),
    ],
)
def test_a_line_is_shown_without_what_nobody_reads(line: str, plain: str) -> None:
    assert log.plain(line) == plain


def test_the_latest_line_is_the_last_one_that_says_anything() -> None:
    assert log.latest("one\ntwo\n\n   \n") == "two"
    assert log.latest("") == ""


def test_without_an_error_the_last_lines_are_all_there_is_to_say() -> None:
    assert log.cause("a\nb\nc\nd\ne\n") == ["b", "c", "d", "e"]


def test_a_module_is_missing_only_if_it_is_the_engine() -> None:
    assert log.not_installed("ModuleNotFoundError: No module named 'vllm'") == "vllm"
    assert (
        log.not_installed(
            "/usr/bin/python: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang')"
        )
        == "sglang"
    )
    assert log.not_installed("ModuleNotFoundError: No module named 'numpy'") is None
