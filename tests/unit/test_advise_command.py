"""`commutator advise`, from the command line to what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import commutator
from engines.links import NOMINAL
from planner.advise.gpus import GPUS
from planner.advise.models import MODELS

ROOT = Path(commutator.__file__).parent

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def said(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> tuple[int, str, str]:
    code = commutator.run(["advise", *argv], environ)
    out, err = capsys.readouterr()
    return code, out, err


def answered(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    code, out, err = said(capsys, *line.split(), "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_published_figures_come_out_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    qwen = answered(capsys, "--model Qwen3-0.6B --prompt-tokens 3067 --link 104MB/s")
    assert (qwen["kv_bytes_per_token"], qwen["kv_bytes"]) == (114_688, 351_748_096)
    assert qwen["transfer_s"] == pytest.approx(3.38, abs=0.005)
    assert qwen["verdict"] == "does not pay"
    large = answered(capsys, "--model Qwen3-32B --prompt-tokens 8000 --link 100GbE")
    assert (large["kv_bytes_per_token"], large["verdict"]) == (262_144, "pays")
    assert large["kv_bytes"] == pytest.approx(2.1e9, rel=0.005)
    assert large["remote_s"] < large["local_s"]


def test_a_folder_a_file_and_a_name_give_the_same_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen3-8B"]))
    (tmp_path / "other.json").write_text(json.dumps(MODELS["Qwen3-8B"]))
    by_name, by_folder, by_file, by_other = (
        answered(capsys, f"--model {model} --prompt-tokens 4000 --link 25GbE")
        for model in ("Qwen3-8B", folder, folder / "config.json", tmp_path / "other.json")
    )
    assert by_name == by_folder == by_file
    assert by_other == by_name | {"model": "other.json"}


def test_text_says_both_numbers_the_verdict_and_every_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--model", "Qwen3-32B", "--prompt-tokens", "8000", "--link", "100GbE"]
    code, out, err = said(capsys, *line)
    assert (code, err) == (0, "")
    assert "262,144 bytes a token (256 KiB), 2.097 GB a prompt" in out
    assert "remote        1.64 s = 1.43 s prefill + 210 ms transfer" in out
    assert "local         23.9 s = 1.45 s prefill + 22.5 s interference" in out
    assert "Disaggregation pays: the transfer takes 210 ms" in out
    flat = " ".join(out.split())
    for assumption in json.loads(said(capsys, *line, "--json")[1])["assumptions"]:
        assert f"- {assumption}" in flat
    assert "80% of its nominal 12.5 GB/s" in flat
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--link 50MB/s", "the link carries 50 MB/s to this engine alone: as given"),
        ("--prefill-tokens-per-s 5000", "a prefill takes 5000 tokens/s, as given"),
        ("--decode-step-ms 20", "a decode step takes 20 ms, as given"),
        ("--no-chunked-prefill", "a local prefill goes first: every stream waits for all of it"),
        ("--max-num-batched-tokens 2048", "shares steps of 2,048 tokens"),
        ("--gpu A100 --tensor-parallel 4", "4 × A100 at 40% of 312 TFLOPS"),
        ("--utilisation 0.55", "at 55% of 989 TFLOPS"),
    ],
)
def test_every_option_shows_in_what_is_assumed(capsys: pytest.CaptureFixture[str], more: str, words: str) -> None:
    base = "--model Qwen3-8B --prompt-tokens 4000 --link 25GbE --concurrency 8"
    usual, changed = answered(capsys, base), answered(capsys, f"{base} {more}")
    assert any(words in line for line in changed["assumptions"])
    assert not any(words in line for line in usual["assumptions"])
    assert {name for name in usual if usual[name] != changed[name]} > {"assumptions"}


@pytest.mark.parametrize(
    ("more", "field"),
    [("--kv-dtype fp8", "kv_bytes"), ("--output-tokens 32", "needed_bytes_per_s"), ("--concurrency 9", "interference_s"), ("--tensor-parallel 2", "prefill_s")],
)  # fmt: skip
def test_every_option_has_an_effect(capsys: pytest.CaptureFixture[str], more: str, field: str) -> None:
    base = "--model Qwen3-8B --prompt-tokens 4000 --link 25GbE"
    assert answered(capsys, base)[field] != answered(capsys, f"{base} {more}")[field]


def test_twice_the_gpus_take_half_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    base = "--model Qwen3-8B --prompt-tokens 4000 --link 25GbE"
    one, two = answered(capsys, base), answered(capsys, f"{base} --tensor-parallel 2")
    for field in ("prefill_s", "decode_step_s"):
        assert two[field] == pytest.approx(one[field] / 2)


def test_each_field_of_the_json_is_told_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "advise.md").read_text()
    fields = answered(capsys, "--model Qwen3-8B --prompt-tokens 4000 --link 25GbE")
    assert [name for name in fields if f"| `{name}` |" not in page] == []
    assert page.count("\n| `") >= len(fields)


def test_the_documentation_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    line, shown = re.findall(r"^```\n(.*?)^```", (ROOT / "docs" / "advise.md").read_text(), re.MULTILINE | re.DOTALL)[:2]
    code, out, _ = said(capsys, *line.split()[2:])
    assert code == 0
    assert out.startswith(shown)


def test_the_documentation_has_every_gpu_as_it_is_in_the_table() -> None:
    page = (ROOT / "docs" / "advise.md").read_text()
    for name, gpu in GPUS.items():
        assert f"| {name} | {gpu.flops / 1e12:,.0f} | {gpu.bytes_per_s / 1e12:g} | {gpu.source} |" in page
    assert all(f"`{name}`" in page for name in NOMINAL)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--prompt-tokens", "1", "--link", "1GbE"], "model: a model is needed: --model FILE, FOLDER or NAME"),
        (["--model", "Qwen3-8B", "--link", "1GbE"], "prompt_tokens: the length of a prompt is needed: --prompt-tokens N"),
        (["--model", "Qwen3-8B", "--prompt-tokens", "1"], "link: a link is needed: --link 100GbE, or as measured: --link 104MB/s"),
        (["--model", "Qwen3-8B", "--prompt-tokens", "0", "--link", "1GbE"], "--prompt-tokens: '0' is not allowed"),
        (["--model", "Qwen3-8B", "--prompt-tokens", "1", "--link", "1GbF"], "--link: '1GbF' is neither a rate"),
        (["--model", "Qwen3-8B", "--prompt-tokens", "1", "--link", "1GbE", "--gpu", "H1"], "--gpu: 'H1' is not allowed; allowed is one of A10, A100"),
        (["--model", "Qwen3-8B", "--prompt-tokens", "1", "--link", "1GbE", "--concurrency", "9000"], "max_num_batched_tokens: 8192 leaves no room"),
    ],
)  # fmt: skip
def test_a_question_that_cannot_be_answered_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"commutator advise: error: {line}")


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ("--no-chunked-prefill --max-num-batched-tokens 2048", "--max-num-batched-tokens"),
        ("--prefill-tokens-per-s 5000 --utilisation 0.5", "--utilisation"),
        ("--prefill-tokens-per-s 5000 --decode-step-ms 20 --gpu A100", "--gpu"),
    ],
)
def test_U3_an_option_without_effect_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str], more: str, flag: str) -> None:
    code, _, err = said(capsys, "--model", "Qwen3-8B", "--prompt-tokens", "4000", "--link", "25GbE", *more.split())
    assert code == 2
    assert err.startswith(f"commutator advise: error: {flag}: has no effect")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no model's config"),
        ("[]", "is no model's config"),
        ("[" * 100_000, "is no model's config"),
        ('{"model_type": "llama"}', "the model's config has no num_hidden_layers"),
        ('{"model_type": "qwen3_next", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}', "tells their state's size"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line_and_exit_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    code, out, err = said(capsys, "--model", str(tmp_path), "--prompt-tokens", "100", "--link", "1GbE")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert words in err


def test_a_file_that_is_no_config_is_not_read_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    code, _, err = said(capsys, "--model", str(tmp_path / "config.json"), "--prompt-tokens", "100", "--link", "1GbE")
    assert code == 1
    assert err.endswith("config.json is no model's config: it is larger than 16 MiB\n")


def test_a_model_that_is_not_there_is_an_error_that_lists_those_that_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = said(capsys, "--model", "Qwen/Qwen3-33B", "--prompt-tokens", "100", "--link", "1GbE")
    assert (code, out) == (1, "")
    assert "no file or folder 'Qwen/Qwen3-33B', and no model is known by that name; did you mean 'Qwen3-32B'?; known are: Qwen3-0.6B" in err
    code, _, err = said(capsys, "--model", str(tmp_path), "--prompt-tokens", "100", "--link", "1GbE")
    assert code == 1
    assert "config.json cannot be read: No such file or directory" in err


def test_U3_check_config_prints_what_is_in_force(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "Qwen3-8B"\nprompt_tokens = 4000\nlink = "25GbE"\n')
    code, out, err = said(capsys, "--check-config", "--config", str(file), "--json", COMMUTATOR_GPU="H200")
    assert (code, err) == (0, "")
    assert f'model = "Qwen3-8B"  # {file}: model' in out
    assert 'gpu = "H200"  # COMMUTATOR_GPU' in out
    assert "json = true  # --json" in out
    assert "# decode_step_ms is not set" in out
