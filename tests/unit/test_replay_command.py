"""`commutator replay`, from the command line to the table, the JSON and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

import commutator
from engines.types import Role
from router.replay.command import NewScaler, Progress, setting_of, traffic_of
from router.replay.measure import Run, Spread
from router.replay.plots import PLOTS, page, svg
from router.replay.report import as_json, as_text
from router.replay.settings import ReplaySettings

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

assert NewScaler  # the seam for whoever has a planner


def said(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> tuple[int, str, str]:
    code = commutator.run(["replay", *argv], environ)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests, ten at a time, in pairs that share all but their last block."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * (n // 10), "input_length": 1600, "output_length": 8, "hash_ids": [0, n // 2, 100 + n, 200 + n]}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_run_is_an_object(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "runs.json"
    flags = ["--engines", "2", "--policies", "kv,round-robin", "--speed", "1,2", "--jitter", "--seeds", "2", "--json", str(out_file)]
    code, out, err = said(capsys, str(trace), *flags)
    assert (code, err) == (0, "")
    runs = json.loads(out_file.read_bytes())
    assert [(run["policy"], run["speed"], run["seed"]) for run in runs] == [
        (policy, speed, seed) for speed in (1.0, 2.0) for seed in (0, 1) for policy in ("kv", "round-robin")
    ]
    for run in runs:
        assert {"ttft_s", "itl_s", "e2e_s", "hit_rate", "goodput", "shed", "balance"} <= run.keys()
        assert all(run[name].keys() == {"mean", "p50", "p95", "p99"} for name in ("ttft_s", "itl_s", "e2e_s"))
        assert (run["requests"], run["engines"], run["shed"], run["good"]) == (40, 2, 0.0, 1.0)
    assert {run["hit_rate"] for run in runs if run["policy"] == "kv"}.pop() > 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["speed", "policy", "TTFT"]
    assert len(lines) == 1 + 4
    assert all(re.search(r"\d–\d.*\b2$", line) for line in lines[1:])


def test_json_can_be_all_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "chat", "--requests", "30", "--json", "-", "--policies", "kv")
    assert code == 0
    assert [run["workload"] for run in json.loads(out)] == ["chat"]


def test_a_load_near_saturation_is_tried_several_times(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    common = [str(trace), "--engines", "1", "--policies", "round-robin", "--json", "-", "--jitter"]
    counted = [len(json.loads(said(capsys, *common, "--speed", speed)[1])) for speed in ("0.01", "1000")]
    assert counted == [1, 5]


def test_the_page_shows_plots_and_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, _ = said(capsys, "bursts", "--requests", "40", "--speed", "0.5,1", "--page", str(tmp_path / "page"), "--engines", "2")
    assert code == 0
    written = (tmp_path / "page" / "index.html").read_text()
    for plot in PLOTS:
        figure = ET.fromstring((tmp_path / "page" / f"{plot.name}.svg").read_text())  # noqa: S314 - our own
        assert len(figure.findall("{*}polyline")) == 2
        assert plot.title in written
    assert "round-robin" in written
    assert "http" not in written.replace("http://www.w3.org/2000/svg", ""), "it must need no other file"


def test_a_table_of_ones_own_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,session\n" + "".join(f"{n},{200 * (n // 2 + 1)},10,s{n % 2}\n" for n in range(10))
    )
    code, out, err = said(capsys, str(path), "--block-size", "16", "--json", "-", "--policies", "session")
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["hit_rate"] > 0.5


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        ([], "trace: what to replay is needed: a .jsonl or .csv file, or one of shared, chat"),
        (["chats"], "'chats' is neither a .jsonl or .csv file nor one of"),
        (["chat", "bursts"], "unexpected argument 'bursts': every other option has a name"),
        (["chat", "--jitter"], "--jitter: has no effect on generated traffic"),
        (["chat", "--speed", "0"], "--speed: must be more than 0"),
        (["chat", "--policies", ","], "--policies: names no policy"),
        (["chat", "--policies", "best"], "policy 'best' is unknown"),
        (["chat", "--engine-uneven", "9x0.5"], "--engine-uneven: names 9 engines, of 8 in all"),
        (["chat", "--engine-uneven", "1x0"], "--engine-uneven: an engine's speed must be more than 0"),
        (["chat", "--engine-uneven", "two"], "'two' is not allowed"),
        (["chat", "--engine-kv-tokens", "10"], "--engine-kv-tokens: holds no block"),
        (["chat", "--fail", "8@1"], "--fail: there is no engine 8"),
        (["chat", "--prefill-engines", "8"], "--prefill-engines: leaves no engine"),
        (["chat", "--link", "25GbE"], "--link: has no effect without prefill_engines"),
        (["chat", "--prefill-engines", "1", "--link", "string"], "--link: "),
        (["chat", "--no-kv-events", "--event-delay-ms", "1"], "--event-delay-ms: has no effect without kv_events"),
        (["t.jsonl", "--block-size", "100"], "--block-size: must divide 512"),
    ],
)
def test_what_makes_no_sense_is_said(capsys: pytest.CaptureFixture[str], argv: list[str], wrong: str) -> None:
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert wrong in err


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (["--json", "nowhere/runs.json"], "nowhere/runs.json: no such file or directory"),
        (["--page", "/dev/null/page"], "/dev/null/page: not a directory"),
        (["--policies", "kv,nope"], "policy 'nope' is unknown"),
    ],
)
def test_what_would_fail_at_the_end_fails_before_anything_is_played(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], wrong: str
) -> None:
    monkeypatch.setattr("router.replay.command.traffic_of", lambda *_: pytest.fail("it is played"))
    code, out, err = said(capsys, "chat", *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"commutator replay: error: {wrong}")


def test_a_trace_that_cannot_be_read_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert said(capsys, str(tmp_path / "none.jsonl"))[0] == 1
    (tmp_path / "bad.jsonl").write_text("{}\n")
    code, _, err = said(capsys, str(tmp_path / "bad.jsonl"))
    assert code == 1
    assert "bad.jsonl, line 1" in err


def test_help_says_how_the_trace_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--help")
    assert code == 0
    assert out.startswith("usage: commutator replay TRACE [OPTIONS]")


def test_options_make_the_fleet() -> None:
    split = setting_of(ReplaySettings(trace="chat", engines=4, prefill_engines=1, link="10GB/s", fail="2@5+1,3@6.5"))
    assert [member.role for member in split.members] == [Role.PREFILL, *[Role.DECODE] * 3]
    assert split.hardware.link_bytes_per_s == 10e9
    assert [(one.engine, one.at_s, one.back_after_s) for one in split.failures] == [(2, 5.0, 1.0), (3, 6.5, None)]
    settings = ReplaySettings(trace="chat", engines=4)
    uneven = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, uneven="1x0.5,2x0.25", step_ms=9.0))
    made = setting_of(uneven)
    assert [member.speed for member in made.members] == [1.0, 0.5, 0.25, 0.25]
    assert (made.hardware.model.step_s, made.hardware.model.prefill_token_s, made.hardware.block_size) == (0.009, 50e-6, 64)
    assert len(traffic_of(msgspec.structs.replace(settings, requests=7), seed=0).arrivals) == 7


def test_progress_is_shown_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal:
        def __init__(self, tty: bool) -> None:
            self.tty, self.text = tty, ""

        def isatty(self) -> bool:
            return self.tty

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    shown, hidden = Terminal(True), Terminal(False)
    for out in (shown, hidden):
        bar = Progress(out)  # type: ignore[arg-type]
        bar.show("kv", 0.5)
        bar.over()
    assert " 50% kv" in shown.text
    assert shown.text.endswith("\r\x1b[K")
    assert hidden.text == ""


def ran(policy: str, speed: float, seed: int, ttft: float) -> Run:
    times = Spread(ttft, ttft, ttft, ttft)
    return Run("w", policy, speed, seed, 8, 100, times, times, times, 0.5, 4.0, 0.9, 0.01, 0.0, 1.1, 0.7, 800.0, 100.0, 1.5)


def test_several_seeds_are_told_by_their_median_and_spread() -> None:
    runs = [ran(policy, 1.0, seed, base * (1 + seed)) for seed in range(3) for policy, base in (("kv", 0.1), ("<b>", 0.4))]
    head, kv, other = (re.split(r"  +", line.strip()) for line in as_text(runs).splitlines())
    told = dict(zip(head, kv, strict=False))
    assert (told["TTFT s"], told["TTFT/<b>"], told["TTFT from–to"], told["seeds"]) == ("0.200", "0.250", "0.100–0.300", "3")
    assert other[head.index("TTFT/<b>")] == "1.000"
    assert json.loads(as_json(runs))[0]["ttft_s"]["mean"] == 0.1
    shown = page(runs, "w & x")
    assert "<title>w &amp; x</title>" in shown
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    for plot in PLOTS:
        ET.fromstring(svg(plot, runs))  # noqa: S314 - our own
