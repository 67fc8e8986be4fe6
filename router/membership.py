"""What happens when an engine joins, changes or leaves: every room that keeps something about it is told, in one place.

joined ──▶ connections, caches, events ──▶ tokenizer checked, cache known ──▶ serving
left   ──▶ the same rooms, in reverse; requests in flight there may still end well
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import msgspec

from discovery.logs import event
from engines.client import EngineClient
from engines.kv_bytes import KvDtype, KvShape, kv_shape
from engines.model_fields import ModelConfigError
from engines.types import Role
from router.forward import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from discovery.mirror import Mirror
    from discovery.sharing import Follower
    from engines.metrics import EngineLoad
    from engines.types import EngineInfo
    from router.caches import Caches
    from router.calibration import Calibration
    from router.fleet import Fleet
    from router.load import LoadBook
    from router.pairing import Pairing
    from router.pool import EnginePool
    from router.prompts.book import PromptBook
    from router.upstream import Timeouts

CACHE_KNOWN_WITHIN_S: Final = 5.0
"""How long an engine's first snapshot is waited for; after that it serves all the same, and its signal says what is missing."""
POLL_S: Final = 0.02
PARITY_TIMEOUT_S: Final = 10.0

COMPUTES_AGAIN: Final = (
    "it is handed prompts and computes them itself, by its own count: was it started with the --kv-transfer-config of a decode engine, and "
    "can it reach the prefill engine?"
)

log = logging.getLogger(__name__)


class Membership:
    """Hears of engines from the monitor; `lines` is how the proxy reaches them."""

    def __init__(  # noqa: PLR0913  it is the one place that knows every room an engine has a part in
        self,
        *,
        fleet: Fleet,
        caches: Caches,
        load: LoadBook,
        pairing: Pairing,
        calibration: Calibration,
        relay: Follower,
        mirror: Mirror,
        prompts: PromptBook,
        timeouts: Timeouts,
        pass_clients_keys: bool,
        session: aiohttp.ClientSession,
        group: asyncio.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        self.lines: dict[str, Line] = {}
        self._fleet = fleet
        self._caches = caches
        self._load = load
        self._pairing = pairing
        self._calibration = calibration
        self._relay = relay
        self._mirror = mirror
        self._prompts = prompts
        self._timeouts = timeouts
        self._pass_clients_keys = pass_clients_keys
        self._session = session
        self._group = group
        self._clock = clock
        self._leaving: list[EnginePool] = []
        """Connections to engines that have left."""
        self._joining: dict[str, asyncio.Task[None]] = {}

    # discovery.watch.Listener

    def joined(self, info: EngineInfo) -> None:
        """Prepare everything for the engine; it serves once its tokenizer has been checked and its cache is known."""
        self._fleet.add(info)
        self.lines[info.id] = Line(info, self._timeouts, pass_clients_key=self._pass_clients_keys)
        for endpoint in info.endpoints:
            self._caches.add(endpoint, None if info.total_blocks is None else max(info.total_blocks, info.host_blocks or 0))
        self._relay.follow(info)  # first: what this process follows itself, its mirror need not ask for
        self._mirror.expect(info)
        self._joining[info.id] = self._group.create_task(self._admit(info), name=f"admit {info.id}")

    def changed(self, info: EngineInfo) -> None:
        """Its list of models is another."""
        self._fleet.update(info)

    def left(self, info: EngineInfo, reason: str) -> None:  # noqa: ARG002  the watch has logged it
        """Forget the engine everywhere."""
        joining = self._joining.pop(info.id, None)
        if joining is not None:
            joining.cancel()
        self._fleet.remove(info.id)
        self._relay.unfollow(info.id)
        self._mirror.forget(info.id)
        self._prompts.leave(info.id)
        for endpoint in info.endpoints:
            self._caches.discard(endpoint)
            self._load.forget(endpoint)
            self._pairing.forget(endpoint)
            self._calibration.forget(endpoint)
        pool = self.lines.pop(info.id).pool
        pool.close()
        self._leaving.append(pool)

    def sweep(self) -> None:
        """End what engines take too long for, those that have left included: their streams may go on, but not for ever."""
        now = self._clock()
        for line in self.lines.values():
            line.pool.sweep(now)
        for pool in self._leaving:
            pool.sweep(now)
        self._leaving = [pool for pool in self._leaving if pool.open]

    def load(self, engine_id: str, load: dict[int, EngineLoad], *, answered: bool = True) -> None:
        """This is what it carries; and where it has answered, it is alive."""
        member = self._fleet.members.get(engine_id)
        if member is None:
            return
        member.suspected = member.suspected and not answered
        told = [load[rank].asleep for rank in load if load[rank].asleep is not None]
        if told and any(told) != member.asleep:
            member.asleep = not member.asleep
            event(log, logging.INFO, "engine sleeps" if member.asleep else "engine is awake", engine=engine_id)
        now = self._clock()
        for endpoint in member.info.endpoints:
            if endpoint.rank in load:
                reported = load[endpoint.rank]
                self._load.report(endpoint, reported.running, reported.waiting, reported.kv_usage, now)
                if reported.work is not None and (tokens := self._pairing.reported(endpoint, reported.work)) is not None:
                    event(
                        log,
                        logging.WARNING,
                        "prompts computed twice",
                        engine=engine_id,
                        rank=endpoint.rank,
                        tokens=tokens,
                        reason=COMPUTES_AGAIN,
                    )

    def busy(self, engine_id: str) -> bool:
        """Whether requests of ours are in flight there."""
        line = self.lines.get(engine_id)
        return line is not None and line.pool.streaming

    # inside

    async def _admit(self, info: EngineInfo) -> None:
        client = EngineClient.of(self._session, info.spec, timeout_s=PARITY_TIMEOUT_S)

        async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await client.post_json(path, body)
            return answer if isinstance(answer, dict) else {}

        status = await self._prompts.join(info, post)
        if info.role is not Role.AGGREGATED:
            self._pairing.know(info, await asyncio.to_thread(_kv_shape, info, self._prompts.folder(info.id)))
        deadline = self._clock() + CACHE_KNOWN_WITHIN_S
        while not all(self._mirror.ready(endpoint) for endpoint in info.endpoints) and self._clock() < deadline:  # noqa: ASYNC110  rare
            await asyncio.sleep(POLL_S)  # the mirror has no waiters to wake: an engine joins rarely, a batch comes often
        member = self._fleet.members[info.id]
        member.tokenizer_line = status.line
        self._fleet.serve(info.id)
        self._joining.pop(info.id, None)
        event(log, logging.INFO, "engine serves", engine=info.id, tokenizer=status.line)


def _kv_shape(info: EngineInfo, folder: str | None) -> KvShape | None:
    """How much KV cache its model's tokens take; None, and a line that says why, where that cannot be told."""
    if folder is None:
        event(log, logging.WARNING, "size of the KV cache is not known", engine=info.id, reason="the model's files are not on this machine")
        return None
    try:
        config = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=dict[str, Any])
        dtype = info.kv_dtype if info.kv_dtype in get_args(KvDtype) else "auto"
        return kv_shape(config, kv_dtype=cast("KvDtype", dtype))
    except (OSError, msgspec.DecodeError, ModelConfigError) as error:
        event(log, logging.WARNING, "size of the KV cache is not known", engine=info.id, reason=str(error))
        return None
