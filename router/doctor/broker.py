"""Does the bus carry what routers and relays say on it? Connects as they do, says something under each kind of subject, and listens.

What is said is for an engine that nobody has, so nobody takes it for something.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from discovery.access import AccessUnusable, access_of
from discovery.bus import Bus, BusError, BusOptions
from discovery.feed import PIECE_BYTES
from discovery.subjects import Subjects, from_token
from engines.types import Endpoint, EngineInfo
from router.doctor.findings import Finding, ok, warning, wrong
from router.doctor.settings import DoctorSettings

LISTEN_S: Final = 2.5
"""A relay says something of each engine every 2 s."""
ROUNDS: Final = 20
LATE_S: Final = 0.1
"""A burst of prompts is over sooner: what was told later than this comes too late for it."""
LEAST_PAYLOAD: Final = PIECE_BYTES + 4096
"""The longest message of ours: its keys, and what is round them."""
NOBODY: Final = Endpoint("http://nobody.invalid:1", 0)


async def bus(settings: DoctorSettings, engines: Sequence[EngineInfo]) -> list[Finding]:
    """Everything about the bus, and who relays these engines on it."""
    connected = Bus(BusOptions(access=access_of(settings)))
    try:
        await connected.connect(settings.nats or "", name="commutator doctor")
    except (BusError, AccessUnusable) as error:
        return [wrong("bus", "nats", str(error), "mend --nats and the nats_… settings; see guarding.md")]
    subject = connected.servers
    try:
        names, heard = Subjects(settings.namespace), Ear()
        refused = await _refused(connected, names)
        if refused:
            told = f"it does not let us use {', '.join(refused)}"
            return [
                ok("bus", subject, "connected"),
                wrong("permissions", subject, told, f"allow publish and subscribe on {settings.namespace}.>"),
            ]
        found = [
            ok("bus", subject, "connected"),
            ok("permissions", subject, f"all subjects of {settings.namespace} can be used"),
            _payload(connected, subject),
            await _lag(connected, names, subject),
        ]
        anywhere = connected.subscribe("*.kv.*.*", heard)
        try:
            await connected.flush()
            await asyncio.sleep(LISTEN_S)
        finally:
            anywhere.cancel()
        return found + list(relayed(heard.namespaces, settings.namespace, engines))
    except BusError as error:
        return [wrong("bus", subject, str(error), "its log says why")]
    finally:
        await connected.close()


class Ear:
    """Notes who is told of, and in which namespace."""

    def __init__(self) -> None:
        self.namespaces: dict[str, set[str]] = {}
        """By engine."""

    def __call__(self, subject: str, payload: bytes, reply: str) -> None:
        """A message of a relay."""
        del payload, reply
        namespace, _, token, _ = subject.split(".")
        engine = from_token(token)
        if engine is not None and engine != NOBODY.engine:
            self.namespaces.setdefault(engine, set()).add(namespace)


def relayed(namespaces: dict[str, set[str]], ours: str, engines: Iterable[EngineInfo]) -> Iterable[Finding]:
    """Whether each engine is told of where its routers listen. Pure."""
    for info in engines:
        if not info.kv_sources:
            continue
        told = namespaces.get(info.id, set())
        if ours in told:
            yield ok("relay", info.id, f"its KV events are told of in the namespace {ours}")
        elif told:
            yield wrong(
                "relay",
                info.id,
                f"its KV events are told of in the namespace {', '.join(sorted(told))}, and routers of {ours} do not hear that",
                f"give relays and routers one --namespace ({ours} was asked for here)",
            )
        else:
            yield wrong(
                "relay",
                info.id,
                f"nobody tells of its KV events in the namespace {ours}",
                "does a router or a relay with this --nats follow it?",
            )


async def _refused(connected: Bus, names: Subjects) -> list[str]:
    """Subjects that the server does not let us use."""
    mirror = secrets.token_hex(8)
    read = (names.streams, f"{names.namespace}.snapshot.*.*", names.routers, names.replies(mirror))
    written = (names.stream(NOBODY), names.snapshot(NOBODY), names.reply(mirror, NOBODY, 0))
    refused = []
    for subject in (*read, *written):
        errors = connected.counts.errors
        subscription = connected.subscribe(subject, lambda *_: None) if subject in read else None
        if subscription is None:
            connected.publish(subject, b"")
        await connected.flush()
        if connected.counts.errors > errors:
            refused.append(f"{subject} ({'subscribe' if subscription else 'publish'})")
        if subscription is not None:
            subscription.cancel()
    return refused


def _payload(connected: Bus, subject: str) -> Finding:
    most = connected.max_payload_bytes
    if most < LEAST_PAYLOAD:
        told = f"it takes messages of {most} bytes, and ours have up to {LEAST_PAYLOAD}: copies of a full cache would never arrive"
        return wrong("payload", subject, told, "raise max_payload in its configuration; its default is 1 MB")
    return ok("payload", subject, f"it takes messages of {most} bytes")


async def _lag(connected: Bus, names: Subjects, subject: str) -> Finding:
    """How long a message takes through the server and back."""
    arrived = asyncio.Event()
    name = names.reply(secrets.token_hex(8), NOBODY, 0)
    subscription = connected.subscribe(name, lambda *_: arrived.set())
    took = []
    try:
        await connected.flush()
        for _ in range(ROUNDS):
            arrived.clear()
            began = time.perf_counter()
            connected.publish(name, b"?" * 1024)
            async with asyncio.timeout(5.0):
                await arrived.wait()
            took.append(time.perf_counter() - began)
    except TimeoutError:
        return wrong("lag", subject, "a message did not come back within 5 s", "is the server overloaded? its monitoring says")
    finally:
        subscription.cancel()
    text = f"a message takes {median(took) * 1e3:.1f} ms there and back, {max(took) * 1e3:.1f} ms at worst"
    if median(took) > LATE_S:
        return warning("lag", subject, text, "put a NATS server near the routers")
    return ok("lag", subject, text)
