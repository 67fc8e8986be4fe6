"""Who waits for whom when KV is handed over, and what when nobody comes? The ways of vLLM 0.32 (NIXL, Mooncake) and SGLang 0.5.

          prefill                                            decode
NIXL      answers at once; keeps KV for a lease              pulls from the blocks that the handle names; keeps the lease running
          that the decode engine prolongs                    meanwhile; after the lease it reads what others have put there
Mooncake  answers at once; keeps KV for longer               asks the bootstrap server who has the engine's id, then waits there
SGLang    computes when decode has come, answers             asks the bootstrap server for a while, then waits in the room
          when decode has everything

How long each of them waits is what was seen of the real ones.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from engines.simulator.connections import Handler
from engines.simulator.handover import Fetch, Keep, Transfers
from engines.simulator.sequences import Sequence
from engines.simulator.settings import Connector, SimulateSettings
from engines.simulator.transfer import KV_PATH, Asked, Given, Host, KvExchange, TransferFailed
from engines.types import EngineKind, Role

LEASE_PATH = "/_sim/lease"
HANDSHAKE_S = 5.0
"""After which NIXL gives up an engine that it has not met before."""
ROUTE_TRIES = 15
ROUTE_PAUSE_S = 1.0
"""How often SGLang's decode engine asks a bootstrap server that is not there."""
LOST_S = 10.0
"""After which it notices that a prefill engine is gone: two heartbeats."""
PATIENCE_S = 60.0
"""How much longer than Mooncake's prefill engine its decode engine waits."""
_VLLM_FAILURE = "Internal server error"
_OVERWRITTEN = 0
"""The contents of a block that is not kept any more: whatever others have put there."""
_ROUTE = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


def exchange_of(settings: SimulateSettings) -> type[KvExchange] | None:
    """How engines with these settings hand KV over; None where they take whole requests."""
    if settings.role is Role.AGGREGATED:
        return None
    if settings.kind is EngineKind.SGLANG:
        return Rooms
    return Nixl if settings.connector is Connector.NIXL else Mooncake


class _Lease(msgspec.Struct, frozen=True):
    key: str


class _Renewed(msgspec.Struct, frozen=True):
    pass


class _Registered(msgspec.Struct, frozen=True):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class _Route(msgspec.Struct, frozen=True):
    page_size: int


class Nixl(KvExchange):
    """vLLM's NixlConnector: the decode engine pulls."""

    lease_s = 30.0

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.counts.counts_nixl = True
        self._met: set[str] = set()

    def routes(self) -> dict[str, Handler]:
        """See KvExchange."""
        return super().routes() | {f"POST {LEASE_PATH}": self._renewed}

    def arrived(self, sequence: Sequence) -> bool:
        """See KvExchange; the lease is kept running while the sequence waits for its turn, too."""
        if isinstance(sequence.prompt.handover, Fetch):
            self.own(sequence, self._renew(sequence, sequence.prompt.handover))
        return super().arrived(sequence)

    def handle(self, sequence: Sequence) -> dict[str, Any] | None:
        """The `kv_transfer_params` of an answer: what a decode engine is to be told; None where nothing is kept."""
        handover = sequence.prompt.handover
        if not isinstance(handover, Keep):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [sequence.blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": handover.key,
            "remote_host": self.settings.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.computed,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": sequence.cached,
        }

    async def hand_over(self, asked: Asked) -> Given:
        """See KvExchange. What is not kept any more is read all the same, by whoever still has the handle."""
        if asked.engine != self.engine_id:
            raise TransferFailed(f"Remote NIXL agent engine ID mismatch. Expected {asked.engine}, received {self.engine_id}.")
        held = {
            block: content
            for kept in self.kept.values()
            if kept.sequence
            for block, content in zip(kept.sequence.blocks, kept.contents, strict=False)
        }
        blocks = asked.blocks or ()
        given = Given(tuple(held.get(block, _OVERWRITTEN) for block in blocks))
        if (kept := self.kept.get(asked.key)) is None:
            self.counts.late += 1
            await self.carry(len(blocks))
            return given
        with self.asking(asked.key, kept):
            await self.carry(len(blocks))
            self.forget(asked.key)
        return given

    async def bring(self, fetch: Fetch, asked: Asked) -> Given:
        """See KvExchange."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            given = await self.ask(fetch.url, KV_PATH, asked, answer=Given)
        except TransferFailed as failure:
            raise TransferFailed(_VLLM_FAILURE) from failure
        except aiohttp.ClientError as error:
            if fetch.engine not in self._met:
                await asyncio.sleep(max(0.0, started + HANDSHAKE_S - loop.time()))
            raise TransferFailed(_VLLM_FAILURE) from error
        self._met.add(fetch.engine)
        self.count(len(given.contents), loop.time() - started)
        return Given(given.contents, fetch.cached)

    async def _renew(self, sequence: Sequence, fetch: Fetch) -> None:
        while sequence.fetches and not sequence.done:
            try:
                await self.ask(fetch.url, LEASE_PATH, _Lease(fetch.key), answer=_Renewed)
            except (aiohttp.ClientError, TransferFailed):
                return  # whoever is not there loses nothing by it, and the fetch will find out
            await asyncio.sleep(self.lease / 6)

    async def _renewed(self, request: web.Request) -> web.StreamResponse:
        key = msgspec.json.decode(await request.read(), type=_Lease).key
        if (kept := self.kept.get(key)) is not None:
            self.extend(key, kept, self.lease * 2 / 3)
        return web.json_response({})


class Mooncake(KvExchange):
    """vLLM's MooncakeConnector: the prefill engine sends, when it is asked to."""

    lease_s = 480.0

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._workers: dict[str, str] = {}
        """Prefill engines that have been found, by their id: where each is asked."""

    def routes(self) -> dict[str, Handler]:
        """See KvExchange; only a prefill engine has a bootstrap server."""
        return super().routes() | ({"GET /query": self._query} if self.settings.role is Role.PREFILL else {})

    async def hand_over(self, asked: Asked) -> Given:
        """See KvExchange; waits for the prompt."""
        kept = self.keeping(asked.key)
        with self.asking(asked.key, kept):
            try:
                async with asyncio.timeout(self.lease):
                    await kept.ready.wait()
            except TimeoutError as error:
                raise TransferFailed("Timeout waiting for P side ready.") from error
            await self.carry(asked.missing)
            self.forget(asked.key)
        return Given(kept.contents[-asked.missing :])

    async def bring(self, fetch: Fetch, asked: Asked) -> Given:
        """See KvExchange. An engine that has been found once is not looked for again."""
        try:
            if fetch.engine not in self._workers:
                found = await self.ask(fetch.url, "/query", answer=dict[str, _Registered])
                self._workers |= {one.engine_id: "http://" + one.worker_addr["0"]["0"].removeprefix("tcp://") for one in found.values()}
            worker = self._workers.get(fetch.engine)
            given = await self.ask(worker, KV_PATH, asked, answer=Given) if worker else None
        except TransferFailed as failure:
            raise TransferFailed(_VLLM_FAILURE) from failure
        except aiohttp.ClientError as error:
            await asyncio.sleep(self.lease + PATIENCE_S)
            raise TransferFailed(_VLLM_FAILURE) from error
        if given is None:
            raise TransferFailed(_VLLM_FAILURE)
        return given

    async def _query(self, _: web.Request) -> web.StreamResponse:
        address = self.url.replace("http://", "tcp://")
        return web.json_response({"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": address}}}})


class Rooms(KvExchange):
    """SGLang: both engines meet in a room of the prefill engine's bootstrap server."""

    lease_s = 300.0

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.early: dict[str, list[Sequence]] = {}
        """On the prefill engine: prompts whose decode engine has not come, by room."""
        self._taken: set[str] = set()
        """Rooms in which a decode engine is."""

    def routes(self) -> dict[str, Handler]:
        """See KvExchange; only a prefill engine has a bootstrap server."""
        if self.settings.role is not Role.PREFILL:
            return {}
        return super().routes() | {"GET /health": self._healthy, "GET /route": self._routed}

    @property
    def recomputes(self) -> bool:
        """See KvExchange: SGLang never does."""
        return False

    def counted(self) -> Transfers:
        """See KvExchange."""
        self.counts.early = sum(map(len, self.early.values()))
        self.counts.in_flight = sum(kept.sequence is not None for kept in self.kept.values())
        return self.counts

    def arrived(self, sequence: Sequence) -> bool:
        """See KvExchange; a prompt whose decode engine has not come waits for it."""
        handover = sequence.prompt.handover
        if not isinstance(handover, Keep):
            return super().arrived(sequence)
        if handover.key in self._taken:
            return True
        self.early.setdefault(handover.key, []).append(sequence)
        asyncio.get_running_loop().call_later(self.lease, self._nobody_came, sequence, handover.key)
        return False

    def finished(self, sequence: Sequence) -> bool:
        """See KvExchange; the answer waits until the decode engine has everything."""
        handover = sequence.prompt.handover
        if not isinstance(handover, Keep):
            return True
        if handover.key in self.kept and self.kept[handover.key].sequence is not None:  # a second prompt in the same room
            self.core.scheduler.forget(sequence)
            return True
        self.keep(handover.key, sequence)
        return False

    def left(self, sequence: Sequence) -> None:
        """See KvExchange."""
        handover = sequence.prompt.handover
        if self._take_early(sequence):
            self.drop(sequence)
        elif isinstance(handover, Keep) and not sequence.done and handover.key in self.kept:
            self.kept[handover.key].ready.set()  # and nothing in it: decode waits no longer
        super().left(sequence)

    async def hand_over(self, asked: Asked) -> Given:
        """See KvExchange; a second decode engine in the same room waits for ever."""
        if asked.key in self._taken:
            await asyncio.get_running_loop().create_future()
        self._taken.add(asked.key)
        try:
            for sequence in self.early.pop(asked.key, ()):
                self.core.queue(sequence)
            kept = self.keeping(asked.key)
            with self.asking(asked.key, kept):
                await kept.ready.wait()
                self.count(asked.missing, await self.carry(asked.missing))
                self.forget(asked.key)
        finally:
            self._taken.discard(asked.key)
        if kept.sequence is None:
            raise TransferFailed("no prompt in this room")
        self.core.tell(kept.sequence)
        return Given(kept.contents[-asked.missing :], kept.sequence.cached)

    def expired(self, sequence: Sequence) -> None:
        """See KvExchange."""
        super().expired(sequence)
        self.core.fail(sequence, "Prefill transfer failed: the decode engine has not taken the KV.")

    async def bring(self, fetch: Fetch, asked: Asked) -> Given:
        """See KvExchange."""
        for attempt in range(ROUTE_TRIES):
            try:
                await self.ask(fetch.url, _ROUTE, answer=_Route)
                break
            except (aiohttp.ClientError, TransferFailed) as error:
                if attempt == ROUTE_TRIES - 1:
                    raise TransferFailed(
                        f"Decode handshake failed for request rank=0 decode_req.req.bootstrap_room={fetch.key} with exception "
                        f"KVTransferError(bootstrap_room={fetch.key}): Aborted by AbortReq."
                    ) from error
            await asyncio.sleep(ROUTE_PAUSE_S)
        try:
            async with asyncio.timeout(self.lease):
                return await self.ask(fetch.url, KV_PATH, asked, answer=Given)
        except TimeoutError as error:
            raise TransferFailed(_failed(fetch, f"Request {fetch.key} timed out after {self.lease}s in KVPoll.WaitingForInput")) from error
        except aiohttp.ClientError as error:
            await asyncio.sleep(LOST_S)
            raise TransferFailed(_failed(fetch, f"Lost connection with prefill instance (bootstrap_addr: {fetch.url})")) from error

    def _nobody_came(self, sequence: Sequence, room: str) -> None:
        if self._take_early(sequence):
            sequence.done = True
            self.core.fail(sequence, f"Prefill bootstrap failed for request rank=0: room {room} timed out after {self.lease}s")

    def _take_early(self, sequence: Sequence) -> bool:
        """Take a prompt out of its room; False where it is in none."""
        handover = sequence.prompt.handover
        if not isinstance(handover, Keep) or sequence not in self.early.get(handover.key, ()):
            return False
        self.early[handover.key].remove(sequence)
        if not self.early[handover.key]:
            del self.early[handover.key]
        return True

    async def _healthy(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="OK")

    async def _routed(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("prefill_dp_rank", "-1") != "-1":
            return web.json_response({"rank_ip": self.settings.host, "rank_port": self.port})
        return web.json_response(
            {
                "attn_tp_size": 1,
                "attn_cp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "page_size": self.settings.block_size,
                "kv_cache_dtype": "auto",
                "follow_bootstrap_room": True,
                "decode_allocation_policy": "early",
            }
        )


def _failed(fetch: Fetch, why: str) -> str:
    return f"Decode transfer failed for request rank=0 decode_req.req.bootstrap_room={fetch.key} with exception KVTransferError(bootstrap_room={fetch.key}): {why}"
