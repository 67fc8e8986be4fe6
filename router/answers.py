"""What does the router answer by itself? Models, health, readiness, metrics, and why it would choose which engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qs

import msgspec

from router import openai
from router.chooser import Choice, Chooser
from router.errand import in_task
from router.metrics import CONTENT_TYPE
from router.processes.messages import Readiness
from router.routes import INFERENCE, PromptForm, Route
from router.scheduling.scheduler import NoCandidate, PolicyError
from router.scheduling.types import Decision

if TYPE_CHECKING:
    from router.exchange import Exchange
    from router.fleet import Fleet
    from router.intake import Intake
    from router.metrics import Metrics

Answer = Callable[["Exchange"], Coroutine[Any, Any, None]]


class Group(Protocol):
    """All processes on one port, of which this is one. Raises GroupSilent."""

    async def page(self) -> bytes:
        """The metrics page of all."""
        ...

    async def readiness(self) -> Readiness:
        """What can be relied on in all."""
        ...


class GroupSilent(Exception):
    """The other processes do not answer."""


class Answers:
    """The router's own paths. What tells of the router as a whole is the same in every process of a group."""

    def __init__(
        self,
        fleet: Fleet,
        intake: Intake,
        chooser: Chooser,
        metrics: Metrics,
        *,
        accepting: Callable[[], bool],
        group: Group | None = None,
    ) -> None:
        """`accepting` tells whether new requests are taken: no longer, once the router is stopping."""
        self._fleet = fleet
        self._intake = intake
        self._chooser = chooser
        self._metrics = metrics
        self._accepting = accepting
        self._group = group
        self._paths: Final[dict[bytes, tuple[str, Answer]]] = {
            b"/v1/models": ("GET", self.models),
            b"/health": ("GET", self.health),
            b"/ready": ("GET", self.ready),
            b"/metrics": ("GET", self.metrics),
            b"/route": ("POST", self.route),
        }

    async def serve(self, exchange: Exchange) -> None:
        """Answer any path that is not an engine's."""
        method, answer = self._found(exchange.path)
        allowed = ["GET", "HEAD", "OPTIONS"] if method == "GET" and answer is not None else [method, "OPTIONS"]
        allow = [(b"allow", ", ".join(allowed).encode())]
        if not method:
            exchange.error(404, f"no such path: {exchange.path.decode('utf-8', 'replace')}")
        elif exchange.method == "OPTIONS":
            exchange.begin(204, allow, None)
            exchange.end()
        elif exchange.method not in allowed:
            exchange.error(405, f"{exchange.method} is not allowed here; use {method}", headers=allow)
        elif answer is None:  # an inference path that the proxy did not take
            exchange.error(426, "this path is for WebSockets", headers=[(b"upgrade", b"websocket")])
        else:
            await answer(exchange)

    def _found(self, path: bytes) -> tuple[str, Answer | None]:
        """The method that a path takes ("" when there is no such path), and who answers; None for an engine."""
        route = INFERENCE.get(path)
        if route is not None:
            return route.method, None
        if path.startswith(b"/v1/models/"):
            return "GET", self.model
        return self._paths.get(path, ("", None))

    async def models(self, exchange: Exchange) -> None:
        """Every model of every serving engine, once, as its engine describes it."""
        exchange.respond(200, msgspec.json.encode({"object": "list", "data": [model.card for model in self._fleet.models()]}))

    async def model(self, exchange: Exchange) -> None:
        """One of them."""
        model_id = exchange.path.removeprefix(b"/v1/models/").decode("utf-8", "replace")
        for model in self._fleet.models():
            if model.id == model_id:
                exchange.respond(200, bytes(model.card))
                return
        exchange.error(404, f"the model `{model_id}` does not exist")

    async def health(self, exchange: Exchange) -> None:
        """The process is alive; it says nothing about engines."""
        exchange.respond(200, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        """Which models have an engine. 503 when none has, or, with `?model=M`, when M has none; and until the engines named are known."""
        wanted = parse_qs(exchange.query.decode("latin-1")).get("model")
        try:
            known = self.readiness() if self._group is None else await in_task(self._group.readiness())
        except GroupSilent as error:
            exchange.error(503, str(error))
            return
        models = known.models
        ready = known.accepting and (all(models.get(model) for model in wanted) if wanted else any(models.values()))
        body = {"ready": ready, "models": models, "joining": known.joining}
        exchange.respond(200 if ready else 503, msgspec.json.encode(body))

    def readiness(self) -> Readiness:
        """What this process takes."""
        models = {model: self._fleet.takers(model) for model in self._fleet.model_ids} | dict.fromkeys(self._fleet.lost_models(), 0)
        joining = [member.info.id for member in self._fleet.members.values() if not member.serving]
        return Readiness(self._accepting(), models, joining)

    async def metrics(self, exchange: Exchange) -> None:
        """The metrics page."""
        try:
            page = self._metrics.page() if self._group is None else await in_task(self._group.page())
        except GroupSilent as error:
            exchange.error(503, str(error))
        else:
            exchange.respond(200, page, CONTENT_TYPE)

    async def route(self, exchange: Exchange) -> None:
        """Which engine would take this body, and why; nothing is sent and nothing is counted.

        The route is given as `?path=/v1/chat/completions`, or follows from the body: `messages` or `prompt`.
        """
        try:
            route = _route_of(exchange)
            asked = await self._intake.read(route, exchange.body, exchange.headers)
            choice = self._chooser.decide(asked, set())
            told = explanation(choice)
        except openai.BadBody as error:
            exchange.error(error.status, str(error), error.code)
        except NoCandidate as error:
            exchange.error(501 if error.never else 503, str(error), "no_engine")
        except PolicyError as error:
            exchange.error(500, str(error), "policy_error")
        else:
            exchange.respond(200, msgspec.json.encode(told))


def _route_of(exchange: Exchange) -> Route:
    path = parse_qs(exchange.query.decode("latin-1")).get("path")
    if path is not None:
        route = INFERENCE.get(path[0].encode())
        if route is None:
            raise openai.BadBody(f"no such inference path: {path[0]}", 404)
        return route
    parsed = openai.parse(exchange.body)
    if parsed.messages is not msgspec.UNSET:
        return INFERENCE[b"/v1/chat/completions"]
    if parsed.prompt is not msgspec.UNSET:
        return INFERENCE[b"/v1/completions"]
    return Route("", PromptForm.GENERATE)


def explanation(choice: Choice) -> dict[str, Any]:
    """A decision for people: the engine, the reason, and what every candidate would have cost."""
    decision = choice.decision
    return {
        "engine": decision.chosen.endpoint.engine,
        "rank": decision.chosen.endpoint.rank,
        "policy": decision.policy,
        "reason": decision.reason,
        "model": choice.asked.request.model,
        "prompt_tokens": choice.asked.request.prompt_tokens,
        "untokenizable": choice.asked.request.untokenizable or None,
        "overlap_tokens": choice.overlap_tokens,
        "prefill": _prefill(choice),
        "candidates": candidates_of(decision),
        "rejected": [{"engine": e.engine, "rank": e.rank, "reason": reason} for e, reason in decision.rejected],
    }


def _prefill(choice: Choice) -> dict[str, Any] | None:
    """Who computes the prompt, where the engine is one that decodes."""
    split = choice.split
    if split is None:
        return None
    told: dict[str, Any] = {"remote": split.remote, "reason": split.why, "remote_s": split.remote_s, "local_s": split.local_s}
    if choice.prefill is not None:
        endpoint = choice.prefill.endpoint
        told |= {"engine": endpoint.engine, "rank": endpoint.rank, "overlap_tokens": choice.prefill.overlap_tokens}
        told["candidates"] = candidates_of(choice.prefill.decision)
    return told


def candidates_of(decision: Decision) -> list[dict[str, Any]]:
    """What each would have cost, and why; the cheapest first. Raises PolicyError where the policy cannot tell."""
    parts: Sequence[Mapping[str, float] | None] = decision.parts() or [None] * len(decision.candidates)
    told = zip(decision.scores, parts, strict=True)
    return [
        {
            "engine": scored.candidate.endpoint.engine,
            "rank": scored.candidate.endpoint.rank,
            "cost": scored.cost,
            "cost_parts": part,
            "block_size": scored.candidate.block_size,
            "prompt_blocks": scored.candidate.prompt_blocks,
            "overlap": scored.candidate.overlap,
            "load": scored.candidate.load,
            "signal": scored.candidate.signal if decision.looked_at_caches else None,
        }
        for scored, part in sorted(told, key=lambda one: one[0].cost)
    ]
