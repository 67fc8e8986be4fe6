from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import commutator

ROOT = Path(commutator.__file__).parent
NAMES = ", ".join(commutator.COMMANDS)


def said(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> tuple[int, str, str]:
    code = commutator.run(argv, environ)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    code, out, err = said(capsys, *argv)
    assert (code, err) == (0, "")
    assert all(f"  {name}" in out for name in commutator.COMMANDS)


@pytest.mark.parametrize("name", commutator.COMMANDS)
def test_each_command_has_help_even_among_other_options(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = said(capsys, name, "--port", "nonsense", "--help")
    assert (code, err) == (0, "")
    assert f"usage: commutator {name}" in out
    assert "--check-config" in out


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert said(capsys, "--version") == (0, f"commutator {version}\n", "")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], f"commutator: error: a command is needed: {NAMES}; see commutator --help"),
        (["serv"], "commutator: error: unknown command 'serv'; did you mean 'serve'?; see commutator --help"),
        (["--port", "1"], f"commutator: error: a command comes before --port: {NAMES}"),
        (["serve"], "commutator serve: error: engine: no engine is named; name at least one: --engine http://HOST:PORT"),
        (["serve", "--engine", "http://h:1", "--polic", "kv"], "commutator serve: error: unknown option --polic; did you mean '--policy'?"),
        (["serve", "--engine", "http://h:1", "--engine", "http://h:1/"], "commutator serve: error: --engine: http://h:1 is named 2 times"),
        (
            ["serve", "--engine", "http://h:1", "--nats", "h:4222"],
            "commutator serve: error: --nats: 'h:4222' must begin with nats://, tls://, ws:// or wss://",
        ),
        (
            ["simulate", "--port", "70000"],
            "commutator simulate: error: --port: '70000' is not allowed; allowed is a whole number, at least 0, at most 65535",
        ),
    ],
)
def test_what_cannot_be_used_is_one_clear_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == line


@pytest.mark.parametrize(
    ("policy", "flag", "value"),
    [
        ("random", "--blocks-overlap-score-credit", "2"),
        ("session", "--blocks-host-cache-hit-weight", "0.5"),
        ("mine:Policy", "--blocks-prefill-load-scale", "2"),
        ("round-robin", "--predicted-ttl-s", "60"),
        ("least-loaded", "--tokenizer", "/models/m"),
        ("kv", "--session-header", "x-user"),
        ("power-of-two", "--session-header", "x-user"),
    ],
)
def test_U3_an_option_without_effect_is_an_error_that_names_it(
    capsys: pytest.CaptureFixture[str], policy: str, flag: str, value: str
) -> None:
    code, _, err = said(capsys, "serve", "--engine", "http://h:1", "--policy", policy, flag, value)
    assert code == 2
    assert err.startswith(f"commutator serve: error: {flag}: has no effect with policy '{policy}'")


def test_U3_options_of_pairs_that_contradict_each_other_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "serve", "--engine", "http://h:1", "--disagg", "never", "--without-prefill", "enforce")
    assert code == 2
    assert err.startswith(
        "commutator serve: error: --without-prefill: 'enforce' forbids decode engines to compute prompts, and --disagg never"
    )


@pytest.mark.parametrize("name", ["serve", "simulate"])
def test_U3_check_config_prints_what_is_in_force(capsys: pytest.CaptureFixture[str], name: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("port = 81\n")
    # To simulate, variables of other commands.
    engine = {"COMMUTATOR_ENGINE": "http://h:1,api-key=canary", "COMMUTATOR_NATS": "nats://h:1", "COMMUTATOR_NATS_TOKEN": "canary"}
    code, out, err = said(capsys, name, "--check-config", "--config", str(file), "--host", "::1", **engine)
    assert (code, err) == (0, "")
    assert f"port = 81  # {file}: port" in out
    assert 'host = "::1"  # --host' in out
    assert "  # default" in out
    assert tomllib.loads(out)["port"] == 81
    assert "canary" not in out


@pytest.mark.parametrize("args", [["-m", "commutator"], ["-c", "import commutator; commutator.main()"]])
def test_nothing_heavy_is_imported_to_say_the_version(args: list[str]) -> None:
    heavy = "{'aiohttp', 'zmq', 'nats', 'tokenizers', 'uvloop', 'router.app'}"
    code = f"import sys, commutator; commutator.run(['--version'], {{}}); print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[1] == "[]"
    assert subprocess.run([sys.executable, *args, "--version"], capture_output=True, check=True).stdout.startswith(b"commutator ")


async def failing(_settings: object) -> None:
    raise ExceptionGroup(
        "several",
        [OSError(98, "Address already in use"), FileNotFoundError(2, "No such file", "a.jsonl"), ValueError("token: Bearer canary")],
    )


async def interrupted(_settings: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def made_up_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (failing, interrupted):
        command = commutator.Command("made up", "engines.simulator.settings:SimulateSettings", f"{__name__}:{function.__name__}")
        monkeypatch.setitem(commutator.COMMANDS, function.__name__, command)


@pytest.mark.usefixtures("made_up_commands", "logging_as_it_was")
def test_a_failure_is_a_line_for_each_reason_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "failing")
    assert code == 1
    assert err.splitlines() == [
        "commutator failing: error: Address already in use",
        "commutator failing: error: a.jsonl: No such file",
        "commutator failing: error: ValueError: token: Bearer ***; --log-level debug shows where",
    ]


@pytest.mark.usefixtures("made_up_commands", "logging_as_it_was")
def test_an_interrupted_command_says_so_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "interrupted")[0] == 130


def test_the_generated_reference_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "generate-docs", "--check"], check=True)
