"""A port that several processes share, and nobody else."""

from __future__ import annotations

import errno
import socket

import pytest

from engines.types import EngineSpec
from router import settings as module
from router.processes.port import SHARES_PORTS, held
from router.settings import ServeSettings

pytestmark = pytest.mark.skipif(not SHARES_PORTS, reason="Linux alone spreads connections over processes that share a port")


def listener(port: int) -> socket.socket:
    """As a worker listens."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(64)
    sock.setblocking(False)
    return sock


def accepted(sock: socket.socket) -> int:
    count = 0
    try:
        while True:
            sock.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count


def test_connections_are_spread_over_those_who_listen_and_none_is_lost_to_the_one_who_holds_the_port() -> None:
    with held("127.0.0.1", 0) as port, listener(port) as one, listener(port) as other:
        clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(40)]
        counts = (accepted(one), accepted(other))
        assert sum(counts) == 40
        assert min(counts) > 0
        for client in clients:
            client.close()


def test_one_who_comes_back_finds_the_port_still_there() -> None:
    with held("127.0.0.1", 0) as port:
        listener(port).close()
        with listener(port) as again, socket.create_connection(("127.0.0.1", port), timeout=10):
            assert accepted(again) == 1


def test_a_port_that_another_program_has_is_refused_even_if_it_would_share() -> None:
    with held("127.0.0.1", 0) as port, listener(port), pytest.raises(OSError, match="address already in use") as refused:
        held("127.0.0.1", port).__enter__()
    assert refused.value.errno == errno.EADDRINUSE
    with held("127.0.0.1", port) as again:
        assert again == port


def test_every_address_of_a_name_is_held_on_one_port() -> None:
    with held("localhost", 0) as port:
        for family, _, _, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
            with socket.socket(family) as sock, pytest.raises(OSError, match="in use"):
                sock.bind(address)


def test_U3_more_than_one_process_is_refused_where_they_cannot_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(engine=(EngineSpec("http://a:1"),), processes=2)
    assert list(settings.check(frozenset({"processes"}))) == []
    monkeypatch.setattr(module, "SHARES_PORTS", False)
    assert [complaint.key for complaint in settings.check(frozenset({"processes"}))] == ["processes"]
