"""Options that guard the router: what cannot work is an error that names it, and none of them is ever shown."""

from __future__ import annotations

import pytest

import commutator

CANARY = "canary-7f3a9-canary"
ENGINE = ("--engine", "http://h:1")


def said(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> tuple[int, str, str]:
    code = commutator.run(["serve", *argv], environ)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--admin-port", "9000"], "--admin-port: has no effect without admin_token or admin_token_file"),
        (["--admin-host", "0.0.0.0"], "--admin-host: has no effect without admin_token or admin_token_file"),
        (["--admin-token", CANARY, "--admin-token-file", "t"], "--admin-token-file: `admin_token` is given too"),
        (["--admin-token", CANARY, "--admin-port", "8080"], "--admin-port: 8080 is `port` too"),
        (["--admin-token", CANARY, "--port", "8081"], "admin_port: 8081 is `port` too"),
        (["--admin-token", "canary"], "--admin-token: the value is not allowed"),
        (["--admin-token", f"{CANARY} {CANARY}"], "--admin-token: the value is not allowed"),
        (["--tls-key", "k.pem"], "--tls-key: has no effect without tls_cert"),
        (["--api-key", CANARY, "--api-key", f"{CANARY} {CANARY}"], "--api-key: (item 2 is neither"),
        (["--api-key", CANARY, "--api-key", f"bob:{CANARY}"], "--api-key: (item 2 repeats a key"),
        (["--api-key", "alice:"], "--api-key: (item 1 is neither"),
        (["--api-keys", "f"], "unknown option --api-keys; did you mean '--api-key"),
    ],
)
def test_U3_a_guard_that_cannot_work_is_an_error_that_names_it_and_shows_no_secret(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    code, out, err = said(capsys, *ENGINE, *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert "canary" not in err


def test_U3_what_is_in_force_is_printed_but_for_what_it_opens(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"COMMUTATOR_API_KEY": f"alice:{CANARY};{CANARY}2", "COMMUTATOR_ADMIN_TOKEN": CANARY}
    code, out, err = said(capsys, *ENGINE, "--admin-host", "10.0.0.1", "--tls-cert", "c.pem", "--check-config", **environ)
    assert (code, err) == (0, "")
    assert 'api_key = "***"  # COMMUTATOR_API_KEY' in out
    assert 'admin_token = "***"  # COMMUTATOR_ADMIN_TOKEN' in out
    assert 'admin_host = "10.0.0.1"  # --admin-host' in out
    assert 'tls_cert = "c.pem"  # --tls-cert' in out
    assert "canary" not in out


def test_a_router_may_begin_without_engines_where_some_can_be_added(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--check-config")[0] == 2
    code, out, _ = said(capsys, "--check-config", "--admin-token-file", "token")
    assert code == 0
    assert "engine = []" in out


def test_help_tells_where_a_secret_is_better_given(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "--help")
    assert "--api-keys-file" in out
    assert "admin_token_file" in out


def test_the_admin_api_is_closed_unless_a_token_opens_it_and_then_only_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, *ENGINE, "--check-config")
    assert "# admin_token is not set" in out
    assert "api_key = []  # default" in out
    assert 'admin_host = "127.0.0.1"  # default' in out
    assert "admin_port = 8081  # default" in out
