"""Each profile of compose.yaml, run without containers: the router's own command from the file, in front of engines as the file has them."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from discovery.config import load
from discovery.config.specs import parse_engine_spec
from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind, EngineSpec, Role
from engines.urls import host_of
from router.settings import ServeSettings
from tests.rig import prompt, routing, settings_of
from tests.waiting import until

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text())["services"]


def simulated(name: str, spec: EngineSpec) -> SimulatedEngine:
    """An engine that does what the service's does: of its kind, and with events, reports and a connector where its command asks for them."""
    service = SERVICES[name]
    command = " ".join(service["command"])
    if service["command"][0] == "simulate":
        return SimulatedEngine(settings_of())
    sglang = "sglang" in service["image"]
    transfers = "--kv-transfer-config" in command
    return SimulatedEngine(
        settings_of(
            kind=EngineKind.SGLANG if sglang else EngineKind.VLLM,
            kv_events="--kv-events-config" in command,
            prompt_tokens_details=("--enable-cache-report" if sglang else "--enable-prompt-tokens-details") in command,
            role=(spec.role or Role.AGGREGATED) if transfers else Role.AGGREGATED,
        )
    )


@pytest.mark.parametrize("router", [name for name, service in SERVICES.items() if service.get("command", [""])[0] == "serve"])
async def test_each_profile_serves_and_finds_again_what_is_cached(router: str) -> None:
    command = SERVICES[router]["command"]
    loaded = load(ServeSettings, argv=command[1:], environ={}, read_file=lambda path: "", known_variables=frozenset())
    settings = loaded.settings
    assert isinstance(settings, ServeSettings)
    named = [parse_engine_spec(value) for flag, value in pairwise(command) if flag == "--engine"]
    async with contextlib.AsyncExitStack() as stack:
        specs = []
        for spec in named:
            engine = await stack.enter_async_context(simulated(host_of(spec.url), spec))
            specs.append(msgspec.structs.replace(spec, url=engine.url))
        there = await stack.enter_async_context(routing(specs, disagg=settings.disagg))
        first = await there.chat(prompt("again", 300))

        async def heard() -> bool:
            return await there.metric("router_cached_blocks") > 0

        await until(heard, what="its events arrive")
        second = await there.chat(prompt("again", 300))
        assert (first.status, second.status) == (200, 200)
        assert second.engine == first.engine
        assert await there.serving() == len(specs) >= 2
        assert second.cached_tokens > 300
        if any(spec.role is Role.DECODE for spec in specs):
            assert await there.metric("router_kv_transfers_total", outcome="done") >= 1
        assert await there.metric("router_signal_state", state="live") == len(specs)


@pytest.mark.parametrize(
    "name", [name for name, service in SERVICES.items() if "--kv-events-config" in " ".join(service.get("command", []))]
)
def test_engines_are_told_of_events_as_they_read_it(name: str) -> None:
    (argument,) = [argument for argument in SERVICES[name]["command"] if argument.startswith("--kv-events-config=")]
    told = json.loads(argument.partition("=")[2])
    assert told["publisher"] == "zmq"
    assert told["endpoint"] == "tcp://*:5557", "one that names a host is connected to, not bound"
    assert told["replay_endpoint"] == "tcp://*:5558"
    if "sglang" not in SERVICES[name]["image"]:
        assert told["enable_kv_cache_events"] is True
