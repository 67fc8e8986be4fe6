"""What does a router say of its engines, and does it do what it should? Its pages are read, and a prompt is sent to it twice."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from engines import metrics
from engines.client import why_not_connected
from router.doctor.findings import Finding, ok, unknown, warning, wrong

BLOCKS: Final = 8
KNOWN_WITHIN_S: Final = 3.0
POLL_S: Final = 0.05
LEAST_FILES: Final = 16_384
"""Two sockets for each request, and some thousands of them."""
MISSING: Final = 0.1
"""Share of the tokens believed cached that engines did not have."""
ENOUGH_TOKENS: Final = 10_000
_PLAIN_IDS: Final = range(100, 1000)
_random = random.SystemRandom()

REASONS: Final = {"kv", "in_flight"}
"""With which a prompt that is cached should be sent there."""


class RouterSilent(Exception):
    """The router does not answer; the message says how."""


class Router:
    """A router, as its clients see it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"content-type": "application/json", "x-commutator-explain": "1"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. Raises RouterSilent."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=self._headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                return response.status, {name.lower(): value for name, value in response.headers.items()}, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise RouterSilent(why_not_connected(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RouterSilent(str(error) or f"{path} was not answered in time") from error


class Page:
    """A router's metrics."""

    def __init__(self, text: str) -> None:
        self._text = text

    def samples(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """A family's series with these labels."""
        return ((found, value) for found, value in metrics.samples(self._text, name) if found.items() >= labels.items())

    def sum(self, name: str, **labels: str) -> float:
        """Of them."""
        return sum(value for _, value in self.samples(name, **labels))

    @property
    def engines(self) -> list[str]:
        """Those that the router follows, there or not."""
        return sorted({labels["engine"] for labels, _ in self.samples("router_engine_state")})


async def read(router: Router) -> tuple[Page | None, list[Finding]]:
    """The router's metrics, with what they and its readiness say."""
    try:
        ready_status, _, ready = await router.ask("GET", "/ready")
        status, _, page = await router.ask("GET", "/metrics")
    except RouterSilent as error:
        return None, [wrong("router", router.url, f"it does not answer: {error}", "does `commutator serve` run there?")]
    if status != 200 or b"router_requests" not in page:
        return None, [
            wrong("router", router.url, f"what answers is no router of ours ({status} at /metrics)", "give the URL of `commutator serve`")
        ]
    told = Page(page.decode(errors="replace"))
    found = [
        ok("router", router.url, f"{int(told.sum('router_connections'))} connections, {int(told.sum('router_in_progress'))} requests"),
        *_files(told, router.url),
    ]
    return told, [*found, *_ready(ready_status, ready, router.url), *judged(told)]


def _ready(status: int, body: bytes, url: str) -> Iterator[Finding]:
    try:
        known = msgspec.json.decode(body, type=_Ready)
    except msgspec.DecodeError:
        yield wrong("ready", url, f"it answered {status} at /ready", "its log says why")
        return
    lost = [model for model, engines in known.models.items() if not engines]
    if lost:
        yield wrong("ready", url, f"no engine serves {', '.join(lost)}", "see the engines below")
    elif status != 200:
        yield wrong("ready", url, f"it is not ready; joining are {', '.join(known.joining) or 'none'}", "see the engines below")
    else:
        models = ", ".join(f"{model} by {engines}" for model, engines in known.models.items())
        yield ok("ready", url, f"engines that serve: {models}")


def judged(page: Page) -> Iterator[Finding]:
    """What its metrics say of each engine. Pure."""
    for labels, value in page.samples("router_engine_state"):
        if value and labels["state"] != "serving":
            yield wrong(
                "state",
                labels["engine"],
                f"the router does not use it: {labels['state']}",
                _STATES.get(labels["state"], "its log says why"),
            )
    for labels, value in page.samples("router_signal_state"):
        if value:
            yield _signal(labels)
    yield from _versions(page)
    yield from _beliefs(page)
    if page.sum("router_bus_connected") == 0:
        yield wrong(
            "bus", "router", "the router is not connected to its NATS server", "is it up? what engines have cached is not known meanwhile"
        )
    for labels, _ in page.samples("router_kv_link_slow"):
        yield warning(
            "link",
            f"{labels['prefill']} ▸ {labels['decode']}",
            "handovers take far longer than the link or others",
            "do the engines use RDMA? see disagg.md",
        )


_STATES: Final = {
    "draining": "POST /admin/engines/ID/undrain, if it is to serve",
    "asleep": "wake it (POST /wake_up)",
    "ejected": "it does not answer: is it up?",
    "waiting": "it does not answer, or is no engine: start it, or mend its address; the router's log line `waiting for engine` says why",
    "cooling": "it answered 429 or 503 a moment ago; a lower admission.max_active_requests, or more engines",
    "joining": "its tokenizer is being checked and its cache learned; look again in some seconds",
}
_SIGNALS: Final = {
    "blind": "are its KV events on, and does their address reach the router? see the line `events`",
    "stale": "its events have stopped, or the bus or relay is gone; see the log line `KV signal changed`",
    "mismatch": "leave block-size out; it is learned",
    "partial": "a replay_endpoint in its --kv-events-config has all known at once",
}


def _signal(labels: Mapping[str, str]) -> Finding:
    subject, state = f"{labels['engine']}#{labels['rank']}", labels["state"]
    if state == "live":
        return ok("signal", subject, "the router knows what it has cached")
    if state == "partial":
        return warning("signal", subject, "the router knows a part of what it has cached", _SIGNALS[state])
    return wrong("signal", subject, f"the router guesses what it has cached: its signal is {state}", _SIGNALS.get(state, ""))


def _versions(page: Page) -> Iterator[Finding]:
    versions: dict[str, dict[str, list[str]]] = {}
    for labels, _ in page.samples("router_engine_info"):
        versions.setdefault(labels["kind"], {}).setdefault(labels["version"], []).append(labels["engine"])
    for kind, by_version in versions.items():
        if len(by_version) > 1:
            told = "; ".join(f"{version}: {', '.join(engines)}" for version, engines in sorted(by_version.items()))
            yield warning(
                "version", kind, f"engines of several versions: {told}", "finish the update; engines of a pair must be of one version"
            )


def _beliefs(page: Page) -> Iterator[Finding]:
    """Where engines say that they had less cached than was believed."""
    for labels, predicted in page.samples("router_cached_tokens_total", source="predicted"):
        missing = page.sum(
            "router_cached_tokens_error_total", engine=labels["engine"], rank=labels["rank"], by=labels["by"], kind="missing"
        )
        if predicted >= ENOUGH_TOKENS and missing > MISSING * predicted:
            told = f"{missing / predicted:.0%} of the prompt tokens believed cached there, by {labels['by']}, were not"
            mend = "blocks are evicted before they are used again: more memory for the KV cache, or more engines"
            yield warning("beliefs", f"{labels['engine']}#{labels['rank']}", told, mend)


def _files(page: Page, url: str) -> Iterator[Finding]:
    limits = [value for _, value in page.samples("process_max_fds")]
    if not limits:
        yield unknown("files", url, "the router does not say how many files it may have open")
    elif limits[0] < LEAST_FILES:
        told = f"the router may have {limits[0]:.0f} files open, two for each request"
        yield wrong(
            "files", url, told, "ulimit -n 65536 before it starts; LimitNOFILE=65536 in a systemd unit; --ulimit nofile=65536 of docker"
        )
    else:
        yield ok("files", url, f"the router may have {limits[0]:.0f} files open")


async def routing(router: Router) -> list[Finding]:
    """A prompt sent to it twice, for each model. A line for each."""
    try:
        status, _, body = await router.ask("GET", "/v1/models")
        if status == 401:
            return [wrong("routing", router.url, "it wants a key of its clients", "give --router-key, or COMMUTATOR_ROUTER_KEY")]
        models = msgspec.json.decode(body, type=_Models)
        return [await _twice(router, model) for model in models.data if model.parent is None]
    except RouterSilent as error:
        return [wrong("routing", router.url, f"it does not answer: {error}", "its log says why")]
    except msgspec.DecodeError as error:
        return [wrong("routing", router.url, f"what it answered cannot be read: {error}", "its log says why")]


async def _twice(router: Router, model: _Model) -> Finding:
    name = model.id
    size = await _block_size(router, name)
    length = min(BLOCKS * size + size // 2, (model.max_model_len or 1 << 20) - 16)
    body = {"model": name, "prompt": [_random.choice(_PLAIN_IDS) for _ in range(length)], "max_tokens": 1, "temperature": 0}
    first = await router.ask("POST", "/v1/completions", body)
    if first[0] != 200:
        return wrong(
            "routing", name, f"a prompt was answered {first[0]}: {first[2][:200].decode(errors='replace')}", "see the engines below"
        )
    await _until_known(router, body)
    second = await router.ask("POST", "/v1/completions", body)
    if second[0] != 200:
        return wrong("routing", name, f"a prompt was answered {second[0]} the second time", "its log says why")
    return routed(name, first[1], second[1])


def routed(model: str, first: dict[str, str], second: dict[str, str]) -> Finding:
    """What the headers of two equal requests say. Pure."""
    reason, overlap = second.get("x-commutator-reason", ""), int(second.get("x-commutator-overlap-tokens", "0"))
    there, here = first.get("x-commutator-engine", ""), second.get("x-commutator-engine", "")
    if reason == "policy":
        policy = second.get("x-commutator-policy", "")
        return ok("routing", model, f"the policy {policy} does not look at what engines have cached")
    if there == here and overlap and reason in REASONS:
        return ok("routing", model, f"the same prompt went to the same engine, for the {overlap} tokens that it is known to have")
    if there == here and overlap and reason == "predicted":
        return warning("routing", model, "the same prompt went to the same engine, by what had been sent there", "see the line `signal`")
    if reason == "load_outweighed":
        return unknown("routing", model, f"another engine had less to do than {there}, which has the prompt", "try again with less load")
    return wrong(
        "routing",
        model,
        f"the second of two equal prompts did not go where it is cached; the reason is {reason or 'not said'}",
        "see the lines `signal` and `tokenizer`",
    )


async def _block_size(router: Router, model: str) -> int:
    body = {"model": model, "prompt": [_PLAIN_IDS[0]] * 4}
    candidates = await _candidates(router, body)
    return max((int(candidate["block_size"]) for candidate in candidates), default=16)


async def _until_known(router: Router, body: object) -> None:
    """Until some engine is believed to have it, which takes as long as an event takes."""
    deadline = time.monotonic() + KNOWN_WITHIN_S
    while time.monotonic() < deadline:
        if any(candidate["overlap"]["device"] for candidate in await _candidates(router, body)):
            return
        await asyncio.sleep(POLL_S)


async def _candidates(router: Router, body: object) -> Iterable[dict[str, Any]]:
    status, _, told = await router.ask("POST", "/route?path=/v1/completions", body)
    if status != 200:
        return ()
    return msgspec.json.decode(told, type=_Route).candidates


class _Ready(msgspec.Struct):
    models: dict[str, int] = {}
    joining: list[str] = []


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Route(msgspec.Struct):
    candidates: list[dict[str, Any]]
