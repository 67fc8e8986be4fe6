from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

import discovery.broker
from discovery.broker import Broker, BrokerError, find_binary
from discovery.bus import Bus, BusUnreachable
from tests.integration.kv_fleet import connected, running
from tests.waiting import until


def alive(pid: int) -> bool:
    """Whether it still runs; one that has ended and waits to be collected does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def answers(url: str) -> bool:
    with contextlib.suppress(BusUnreachable):
        async with connected(url, "test"):
            return True
    return False


def bound(to: socket.socket, port: int) -> bool:
    """Whether it has the port now: threads of a killed process may hold it a little longer than the process itself shows."""
    with contextlib.suppress(OSError):
        to.bind(("127.0.0.1", port))
        return True
    return False


async def test_a_broker_is_ready_when_its_url_is_told_and_gone_when_it_is_stopped() -> None:
    broker = Broker()
    url = await broker.start()
    pid = broker.pid
    assert pid is not None
    async with connected(url, "test") as bus:
        assert bus.connected
    folder = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2].decode()
    await broker.stop()
    await broker.stop()
    assert not alive(pid)
    assert not Path(folder).parent.exists()


async def test_a_stranger_on_the_same_machine_is_not_let_in() -> None:
    broker = Broker()
    url = await broker.start()
    try:
        token, _, address = url.removeprefix("nats://").partition("@")
        assert token not in Path(f"/proc/{broker.pid}/cmdline").read_text(), "everybody can read a command line"
        for wrong in (f"nats://{address}", f"nats://guess@{address}"):
            with pytest.raises(BusUnreachable, match="Authorization"):
                await Bus().connect(wrong, name="stranger")
    finally:
        await broker.stop()


async def test_it_listens_on_this_machine_only() -> None:
    broker = Broker()
    url = await broker.start()
    try:
        port = int(url.rpartition(":")[2])
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
        assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    finally:
        await broker.stop()


async def test_a_broker_that_dies_comes_back_on_the_same_port_and_is_counted() -> None:
    broker = Broker()
    url = await broker.start()
    async with running(broker.run()):
        try:
            for killed in (1, 2):
                first = broker.pid
                assert first is not None
                os.kill(first, signal.SIGKILL)
                await until(lambda killed=killed: broker.restarts == killed, what="the broker to be started again")
                await until(lambda: answers(url), what="the broker to answer at its old URL")
        finally:
            process = broker.pid
    await broker.stop()
    assert process is not None
    assert not alive(process)


async def test_run_ends_when_the_broker_is_stopped() -> None:
    broker = Broker()
    await broker.start()
    watching = asyncio.get_running_loop().create_task(broker.run())
    await asyncio.sleep(0)
    await broker.stop()
    await asyncio.wait_for(watching, 5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent has ended")
async def test_a_killed_router_leaves_no_broker_behind() -> None:
    program = "import asyncio\nfrom discovery.broker import Broker\nasync def main():\n b = Broker()\n await b.start()\n print(b.pid, flush=True)\n await asyncio.sleep(60)\nasyncio.run(main())"
    router = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert router.stdout is not None
    broker = int(await asyncio.wait_for(router.stdout.readline(), 20))
    assert alive(broker)
    router.kill()
    await router.wait()
    await until(lambda: not alive(broker), what="the broker to end with its router")


def test_without_one_on_the_path_the_wheel_s_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert os.access(find_binary(), os.X_OK)


def failing_server(folder: Path) -> Path:
    made = folder / "nats-server"
    made.write_text("#!/bin/sh\nexit 3\n")
    made.chmod(0o755)
    return made


def test_one_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = failing_server(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == mine


async def test_one_that_does_not_start_is_an_error_that_says_how_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing_server(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match="ended with code 3"):
        await Broker().start()


async def test_where_there_is_none_the_user_is_told_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(discovery.broker, "WHEEL", "no-such-wheel-of-a-nats-server")
    with pytest.raises(BrokerError, match=r"pip install .* --nats"):
        await Broker().start()


async def test_a_port_taken_while_it_was_down_is_had_again_once_it_is_free() -> None:
    broker = Broker()
    url = await broker.start()
    port = int(url.rpartition(":")[2])
    pid = broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await until(lambda: bound(thief, port), what="its port to be free")
        thief.listen()
        async with running(broker.run()):
            await until(lambda: broker.restarts >= 2, what="the broker to fail to start at least once")
            thief.close()
            await until(lambda: answers(url), what="the broker to answer at its old URL", deadline_s=15)
    await broker.stop()
