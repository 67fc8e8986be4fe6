"""How is an engine started so that it can be routed to? Its command line and environment, and what routers are told of it.

    LaunchPlan + Ports ──▶ Program: argv, environment, and the EngineSpec that names it

Besides the model it is given: a port, KV events with replay, cached tokens in `usage`, and with a role its connector. What the plan's own
arguments say comes last, so that it wins; JSON flags are merged with ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from engines.launch.plan import DP_ATTENTION, BadPlan, EngineName, LaunchPlan, Ports
from engines.types import Connector, EngineSpec, Role
from engines.urls import reachable

HOST = "127.0.0.1"
KV_EVENTS, KV_TRANSFER = "--kv-events-config", "--kv-transfer-config"
_CONNECTORS = {Connector.NIXL: "NixlConnector", Connector.MOONCAKE: "MooncakeConnector"}
_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
_OTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Would point an engine's Python at the packages of ours."""
_PRIVATE = "COMMUTATOR_"
"""Begins the variables that are ours: settings, secrets among them."""

Config = dict[str, object]


class Program(msgspec.Struct, frozen=True):
    """What to run, and how routers will know it."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    spec: EngineSpec


def program(plan: LaunchPlan, ports: Ports, environ: dict[str, str]) -> Program:
    """How this plan is started on these ports; `environ` is what it inherits. Raises BadPlan for arguments that cannot be merged."""
    argv, ours, spec = _MADE[plan.engine](plan, ports)
    if plan.gpus:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.gpus))
    return Program(tuple(argv), _inherited(plan, environ) | ours | plan.env, spec)


def _vllm(plan: LaunchPlan, ports: Ports) -> tuple[list[str], dict[str, str], EngineSpec]:
    # "*" makes the publisher bind; with a host name it would connect
    events: Config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{ports.events}", "replay_endpoint": f"tcp://*:{ports.replay}"}
    events, rest = merged(plan.arguments, KV_EVENTS, events)
    environment: dict[str, str] = {}
    transfer: list[str] = []
    connector = None
    if plan.role is not Role.AGGREGATED:
        connector = plan.connector or Connector.NIXL
        config: Config = {"kv_connector": _CONNECTORS[connector], "kv_role": _ROLES[plan.role]}
        if plan.role is Role.DECODE and connector is Connector.NIXL:
            config["kv_load_failure_policy"] = "recompute"
        config, rest = merged(rest, KV_TRANSFER, config)
        transfer = [KV_TRANSFER, _json(config)]
        environment = _transfer_variables(connector, ports)
    publishes = bool(events["enable_kv_cache_events"])
    argv = [
        *(plan.python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", plan.model, "--host", HOST, "--port", str(ports.http)),
        *("--enable-prompt-tokens-details", *((KV_EVENTS, _json(events)) if publishes else ()), *transfer),
        *_sized("--tensor-parallel-size", plan.tensor_parallel_size),
        *_sized("--data-parallel-size", plan.data_parallel_size),
        *rest,
    ]
    bootstrap = f"http://{HOST}:{ports.transfer}" if connector is Connector.MOONCAKE and plan.role is Role.PREFILL else None
    return argv, environment, _spec(plan, ports, events if publishes else {}, connector, bootstrap)


def _transfer_variables(connector: Connector, ports: Ports) -> dict[str, str]:
    """Both engines are on this host, whatever its interfaces."""
    if connector is Connector.MOONCAKE:
        return {"VLLM_HOST_IP": HOST, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports.transfer)}
    return {"VLLM_HOST_IP": HOST, "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.transfer)}


def _sglang(plan: LaunchPlan, ports: Ports) -> tuple[list[str], dict[str, str], EngineSpec]:
    events: Config = {"publisher": "zmq", "endpoint": f"tcp://*:{ports.events}", "replay_endpoint": f"tcp://*:{ports.replay}"}
    events, rest = merged(plan.arguments, KV_EVENTS, events)
    publishes = events["publisher"] == "zmq"
    argv = [
        *(
            plan.python or sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            plan.model,
            "--host",
            HOST,
            "--port",
            str(ports.http),
        ),
        # by default a page is one token, and an event for each
        *("--page-size", "16", "--enable-cache-report", "--enable-metrics"),
        *((KV_EVENTS, _json(events), "--load-publish-endpoint", f"tcp://*:{ports.load}") if publishes else ()),
        *_sized("--tp-size", plan.tensor_parallel_size),
        *_sized("--dp-size", plan.data_parallel_size),
        *(("--dist-init-addr", f"{HOST}:{ports.rendezvous}") if DP_ATTENTION in plan.arguments else ()),
        *(("--disaggregation-mode", plan.role) if plan.role is not Role.AGGREGATED else ()),
        *(("--disaggregation-bootstrap-port", str(ports.transfer)) if plan.role is Role.PREFILL else ()),
        *rest,
    ]
    return argv, {}, _spec(plan, ports, events if publishes else {}, None, None)


def _simulated(plan: LaunchPlan, ports: Ports) -> tuple[list[str], dict[str, str], EngineSpec]:
    connector = None if plan.role is Role.AGGREGATED else plan.connector or Connector.NIXL
    argv = [
        # -P: whatever lies in the current folder is not the command
        *(sys.executable, "-P", "-m", "commutator", "simulate", "--host", HOST, "--port", str(ports.http)),
        *(("--served-model-name", plan.model) if plan.model else ()),
        *(("--role", plan.role, "--kv-transfer-port", str(ports.transfer)) if plan.role is not Role.AGGREGATED else ()),
        *(("--connector", plan.connector) if plan.connector is not None else ()),
        *plan.arguments,
    ]
    bootstrap = f"http://{HOST}:{ports.transfer}" if connector is Connector.MOONCAKE and plan.role is Role.PREFILL else None
    told = connector if bootstrap is not None or connector is Connector.MOONCAKE else None
    return argv, {}, _spec(plan, ports, {}, told, bootstrap)


_MADE: dict[EngineName, Callable[[LaunchPlan, Ports], tuple[list[str], dict[str, str], EngineSpec]]] = {
    EngineName.VLLM: _vllm,
    EngineName.SGLANG: _sglang,
    EngineName.SIMULATED: _simulated,
}


def _spec(plan: LaunchPlan, ports: Ports, events: Config, connector: Connector | None, bootstrap: str | None) -> EngineSpec:
    """What engines of older versions do not say by themselves is told."""
    endpoint, replay = events.get("endpoint"), events.get("replay_endpoint")
    return EngineSpec(
        url=f"http://{HOST}:{ports.http}",
        role=None if plan.role is Role.AGGREGATED else plan.role,
        connector=connector,
        bootstrap=bootstrap,
        kv_events=reachable(endpoint, HOST) if isinstance(endpoint, str) else None,
        kv_replay=reachable(replay, HOST) if isinstance(replay, str) else None,
        kv_topic=str(events.get("topic", "")),
    )


def _inherited(plan: LaunchPlan, environ: dict[str, str]) -> dict[str, str]:
    """Our environment without what is ours alone; the current folder is nobody's package."""
    not_its = _OTHER_PYTHON if plan.python not in {None, sys.executable} else ()
    return {name: value for name, value in environ.items() if not name.startswith(_PRIVATE) and name not in not_its} | {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def merged(arguments: Sequence[str], flag: str, ours: Config) -> tuple[Config, list[str]]:
    """The JSON object that `flag` is to hold: `ours` under what the arguments say; and the arguments without it. Raises BadPlan.

    >>> merged(["-a", "--c", '{"topic": "t"}'], "--c", {"topic": "", "size": 1})
    ({'topic': 't', 'size': 1}, ['-a'])
    """
    rest, config, left = list[str](), dict(ours), list(arguments)
    while left:
        name, equals, text = left.pop(0).partition("=")
        if name != flag:
            rest.append(name + equals + text)
            continue
        if not equals:
            text = left.pop(0) if left else ""
        try:
            config |= msgspec.json.decode(text, type=Config)
        except msgspec.DecodeError as error:
            raise BadPlan(f"{flag} {text!r} is not a JSON object: {error}") from None
    return config, rest


def _sized(flag: str, size: int) -> tuple[str, ...]:
    return (flag, str(size)) if size > 1 else ()


def _json(config: Config) -> str:
    return msgspec.json.encode(config).decode()
