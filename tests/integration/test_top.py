"""`commutator top`: the live page's document in a terminal, drawn on a console that records."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import io
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from discovery.config import ConfigError
from router.top import screen as screens
from router.top.command import NothingToShow, show
from router.top.screen import screen
from router.top.settings import TopSettings
from router.ui.document import document
from tests.integration.commands import COMMAND, command, fails
from tests.rig import Router, fleet, prompt, routing
from tests.waiting import alongside, until

TOKEN = "an-admin-token-for-tests"


def recording(*, terminal: bool = False) -> Console:
    return Console(record=True, width=160, file=io.StringIO(), force_terminal=terminal)


def settings(router: Router, **changed: object) -> TopSettings:
    return msgspec.structs.replace(TopSettings(admin=router.admin, admin_token=TOKEN, once=True), **changed)


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(screens)
    assert results.attempted > 0
    assert results.failed == 0


async def test_it_shows_the_fleet_what_is_wrong_latencies_and_decisions() -> None:
    async with fleet(2) as engines, routing([*engines, "http://127.0.0.1:9"], wait_for=2, admin_token=TOKEN) as router:
        for _ in range(3):
            await router.chat(prompt("a"), stream=True, stream_options={"include_usage": True}, max_tokens=8)
        console = recording()
        await show(settings(router), console)
    shown = console.export_text()
    assert "error: Not there: http://127.0.0.1:9: connection refused" in shown
    assert all(engine.url in shown for engine in engines)
    assert shown.count("serving") == 2
    assert "time to first token" in shown
    assert "no shared prefix" in shown
    assert " ms" in shown


async def test_it_goes_on_while_the_router_is_away_and_says_so() -> None:
    console = recording(terminal=True)
    async with fleet(1) as engines, contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(routing(engines, admin_token=TOKEN))
        async with alongside(show(settings(router, once=False, period_s=0.05), console)) as task:
            await until(lambda: "serving" in console.export_text(clear=False))
            await stack.aclose()
            await until(lambda: "not of now" in console.export_text(clear=False))
            assert not task.done()


async def test_names_from_outside_cannot_speak_to_the_terminal() -> None:
    hostile = "[red]m[/red]\x1b[2J\x07\u202e"
    state = document({}, "1") | {"models": {hostile: 1}, "policy": hostile}
    console = recording(terminal=True)
    console.print(screen(state))
    shown = console.export_text()
    assert "[red]m[/red]" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


async def test_what_keeps_it_from_showing_anything_is_said_in_a_line(tmp_path: Path) -> None:
    async with fleet(1) as engines, routing(engines, admin_token=TOKEN) as router:
        with pytest.raises(NothingToShow, match="does not accept this admin token"):
            await show(settings(router, admin_token="another-token-altogether"), recording())
        with pytest.raises(NothingToShow, match="answered 404"):
            await show(settings(router, admin=router.url), recording())
    with pytest.raises(NothingToShow, match="cannot be asked: connection refused"):
        await show(TopSettings(admin="http://127.0.0.1:9", admin_token=TOKEN), recording())
    with pytest.raises(ConfigError, match="no such file"):
        await show(TopSettings(admin_token_file=str(tmp_path / "none")), recording())


async def test_the_command_takes_the_token_from_where_the_router_has_it(tmp_path: Path) -> None:
    code, said = await fails("top", "--once")
    assert (code, "admin token" in said) == (2, True)
    (tmp_path / "token").write_text(TOKEN)
    async with (
        fleet(1) as engines,
        command("serve", "--engine", engines[0].url, "--admin-port", "0", log=tmp_path / "log", COMMUTATOR_ADMIN_TOKEN=TOKEN) as router,
    ):
        process = await asyncio.create_subprocess_exec(
            *(COMMAND, "top", "--once", "--admin", router.admin, "--admin-token-file", tmp_path / "token"),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"COLUMNS": "160"},
        )
        told, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert engines[0].url in told.decode()
