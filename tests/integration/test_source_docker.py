"""Engines in Docker's containers, through Docker's own API on a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from discovery.sources.docker import DockerSource
from engines.types import EngineSpec, Role
from tests.integration.conftest import Log
from tests.integration.sources import DockerDaemon, finding
from tests.waiting import until

LONG_S = 3600.0
A, B = "http://172.18.0.2:8000", "http://172.18.0.3:8000"


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[DockerDaemon]:
    made = DockerDaemon(tmp_path / "docker.sock")
    await made.start()
    yield made
    await made.close()


async def test_labelled_containers_are_engines_and_events_are_acted_on_at_once(daemon: DockerDaemon) -> None:
    daemon.run("one", "172.18.0.2", port="8000", role="prefill", kv_events="5557")
    daemon.run("database", "172.18.0.9")
    async with finding(DockerSource(daemon.address, LONG_S)) as (_, heard):
        await until(lambda: heard.urls == [A], what="the labelled one is found")
        assert heard.specs[A] == EngineSpec(A, role=Role.PREFILL, kv_events="tcp://172.18.0.2:5557")
        await until(lambda: daemon.heard, what="events are followed")
        daemon.run("two", "172.18.0.3", port="8000")
        await until(lambda: heard.urls == [A, B], what="one that starts is found")
        daemon.stop("one")
        await until(lambda: heard.urls == [B], what="one that stops is let go")


async def test_H1_a_container_whose_end_was_not_told_is_missed_at_the_next_look(daemon: DockerDaemon) -> None:
    daemon.run("one", "172.18.0.2", port="8000")
    daemon.run("two", "172.18.0.3", port="8000")
    async with finding(DockerSource(daemon.address, 0.05)) as (_, heard):
        await until(lambda: heard.urls == [A, B])
        daemon.quiet = True
        daemon.stop("one")
        await until(lambda: heard.urls == [B], what="the lost notice is made good")


async def test_a_daemon_that_is_away_or_broken_lets_nobody_go(daemon: DockerDaemon, logged: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discovery.sources.finder.PAUSE_MIN_S", 0.05)
    daemon.run("one", "172.18.0.2", port="8000")
    async with finding(DockerSource(daemon.address, 0.05)) as (finder, heard):
        (name,) = finder.states
        await until(lambda: heard.urls == [A])
        daemon.broken = True
        await until(lambda: "out of files" in finder.states[name].failure, what="it is said")
        daemon.broken = False
        await until(lambda: not finder.states[name].failure, what="it answers again")
        await daemon.close()
        await until(lambda: finder.states[name].failure, what="it is said")
        assert heard.urls == [A]
        daemon.containers.clear()
        daemon.run("two", "172.18.0.3", port="8000")
        daemon.socket.unlink(missing_ok=True)
        await daemon.start()
        await until(lambda: heard.urls == [B], what="what has changed meanwhile is known")
    assert {line["engines"] for line in logged.lines("source failed; what it said last stands")} == {1}
    assert logged.lines("source answers again")


async def test_a_container_with_a_wrong_label_is_named_and_the_others_are_found(daemon: DockerDaemon, logged: Log) -> None:
    daemon.run("one", "172.18.0.2", port="8000")
    daemon.run("odd", "172.18.0.3", port="8000", rol="prefill")
    async with finding(DockerSource(daemon.address, 0.05)) as (_, heard):
        await until(lambda: heard.urls == [A] and daemon.listed > 2)
    (line,) = logged.lines("engine cannot be followed")
    assert line["reason"] == "container odd: unknown key 'rol'; did you mean 'role'?"
