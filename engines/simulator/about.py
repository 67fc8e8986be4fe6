"""What does an engine say of itself, and how is it told to change? Its models, load, event sources; adapters, sleep, a flush."""

from __future__ import annotations

import msgspec
from aiohttp import web

from engines.simulator import metrics
from engines.simulator.connections import Handler
from engines.simulator.parts import Parts
from engines.simulator.requests import Refusal, decoded
from engines.simulator.settings import Connector
from engines.types import EngineKind, Role

VLLM_VERSION = "0.32.0"
SGLANG_VERSION = "0.5.23"
_BOOTSTRAP_PORT = 8998


class _Adapter(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str = ""


class About:
    """The routes of one engine that generate nothing."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def routes(self) -> dict[str, Handler]:
        """Method and path → who answers."""
        both: dict[str, Handler] = {
            "GET /health": self._ok,
            "GET /v1/models": self._models,
            "GET /metrics": self._metrics,
            "POST /v1/load_lora_adapter": self._load_adapter,
            "POST /v1/unload_lora_adapter": self._unload_adapter,
        }
        if self._parts.settings.kind is EngineKind.VLLM:
            return both | {
                "GET /version": self._version,
                "GET /load": self._load,
                "GET /server_info": self._configuration,
                "GET /kv_event_sources": self._kv_event_sources,
                "POST /reset_prefix_cache": self._reset_prefix_cache,
                "POST /sleep": self._sleep,
                "POST /wake_up": self._wake,
                "GET /is_sleeping": self._is_sleeping,
            }
        return both | {
            "GET /ready": self._ok,
            "GET /health_generate": self._ok,
            "GET /model_info": self._model_info,
            "GET /get_model_info": self._model_info,
            "GET /server_info": self._server_info,
            "GET /get_server_info": self._server_info,
            "GET /v1/loads": self._loads,
            "POST /flush_cache": self._reset_prefix_cache,
        }

    async def _ok(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"version": VLLM_VERSION})

    async def _models(self, _: web.Request) -> web.StreamResponse:
        kind, base = self._parts.settings.kind.value, self._parts.settings.model_names
        common = {"object": "model", "created": int(self._parts.started), "owned_by": kind}
        listed = [
            {"id": name, **common, "root": self._parts.text.folder, "parent": None, "max_model_len": self._parts.context} for name in base
        ]
        listed += [
            {"id": name, **common, "root": path, "parent": base[0], "max_model_len": None}
            for name, path in self._parts.history.adapters.items()
        ]
        return web.json_response({"object": "list", "data": listed})

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        model = self._parts.settings.model_names[0]
        page = metrics.page(
            self._parts.core.scheduler,
            self._parts.settings.kind,
            model,
            started=self._parts.started,
            asleep=self._parts.core.asleep,
            transfers=None if self._parts.exchange is None else self._parts.exchange.counted(),
        )
        return web.Response(text=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _load(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"server_load": len(self._parts.core.scheduler.running) + self._parts.core.scheduler.queued})

    async def _kv_event_sources(self, _: web.Request) -> web.StreamResponse:
        if not self._parts.settings.kv_events:
            return web.json_response({})
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._parts.publisher.port}",
            "replay_endpoint": f"tcp://*:{self._parts.publisher.replay_port}",
            "buffer_steps": self._parts.settings.kv_replay_batches,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self._parts.settings.kv_topic,
        }
        return web.json_response({"0": config})

    async def _configuration(self, _: web.Request) -> web.StreamResponse:
        """What vLLM says in development mode, as far as a router may want to know it."""
        settings, exchange = self._parts.settings, self._parts.exchange
        transfer = None
        if exchange is not None:
            transfer = {
                "kv_connector": {Connector.NIXL: "NixlConnector", Connector.MOONCAKE: "MooncakeConnector"}[settings.connector],
                "engine_id": exchange.engine_id,
                "kv_buffer_device": "cpu",
                "kv_role": "kv_producer" if settings.role is Role.PREFILL else "kv_consumer",
                "kv_connector_extra_config": {"kv_lease_duration": exchange.lease} if settings.connector is Connector.NIXL else {},
                "kv_load_failure_policy": settings.kv_load_failure_policy.value,
            }
        cache = {"block_size": settings.block_size, "num_gpu_blocks": settings.kv_blocks, "cache_dtype": "auto"}
        return web.json_response({"vllm_config": {"cache_config": cache, "kv_transfer_config": transfer}})

    async def _model_info(self, _: web.Request) -> web.StreamResponse:
        names = {
            "model_path": self._parts.text.folder,
            "tokenizer_path": self._parts.text.folder,
            "served_model_name": self._parts.settings.model_names[0],
        }
        return web.json_response({**names, "is_generation": True, "disaggregation_mode": self._mode(), "weight_version": "default"})

    def _mode(self) -> str:
        """SGLang's word for the role."""
        role = self._parts.settings.role
        return "null" if role is Role.AGGREGATED else role.value

    async def _server_info(self, _: web.Request) -> web.StreamResponse:
        settings = self._parts.settings
        feed = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self._parts.publisher.port,
            "topic": settings.kv_topic,
            "block_size": settings.block_size,
            "dp_size": 1,
            "replay_endpoint_port_base": self._parts.publisher.replay_port,
        }
        if settings.load_feed:
            feed |= {"load_endpoint_port_base": self._parts.loads.port, "load_topic": "load"}
        return web.json_response(
            {
                "model_path": self._parts.text.folder,
                "tokenizer_path": self._parts.text.folder,
                "served_model_name": settings.model_names[0],
                "page_size": settings.block_size,
                "dp_size": 1,
                "attn_dp_size": 1,
                "dtype": "bfloat16",
                "kv_cache_dtype": "auto",
                "disaggregation_mode": self._mode(),
                "disaggregation_transfer_backend": "mooncake",
                "disaggregation_bootstrap_port": self._bootstrap_port(),
                "max_running_requests": settings.max_num_seqs,
                "max_prefill_tokens": settings.max_num_batched_tokens,
                "chunked_prefill_size": settings.max_num_batched_tokens,
                "max_total_num_tokens": settings.kv_blocks * settings.block_size,
                "max_req_input_len": self._parts.context - 1,
                "status": "ready",
                "version": SGLANG_VERSION,
                "frontend": "python",
                "kv_events": feed if settings.kv_events else None,
            }
        )

    def _bootstrap_port(self) -> int:
        """A decode engine has no bootstrap server, and tells the port it would have."""
        exchange = self._parts.exchange
        return exchange.port if exchange is not None and self._parts.settings.role is Role.PREFILL else _BOOTSTRAP_PORT

    async def _loads(self, _: web.Request) -> web.StreamResponse:
        scheduler, cache = self._parts.core.scheduler, self._parts.core.scheduler.cache
        total, used = cache.capacity * cache.block_size, cache.used * cache.block_size
        load: dict[str, object] = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": scheduler.queued,
            "num_waiting_uncached_tokens": sum(sequence.length for sequence in scheduler.waiting),
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": total,
            "max_running_requests": self._parts.settings.max_num_seqs,
            "token_usage": used / total,
        }
        if self._parts.exchange is not None:
            load["disaggregation"] = {"mode": self._mode(), **metrics.queues(scheduler, self._parts.exchange.counted())}
        return web.json_response({"loads": [load]})

    async def _load_adapter(self, request: web.Request) -> web.StreamResponse:
        asked = decoded(await request.read(), _Adapter)
        self._parts.history.adapters[asked.lora_name] = asked.lora_path
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.StreamResponse:
        asked = decoded(await request.read(), _Adapter)
        if self._parts.history.adapters.pop(asked.lora_name, None) is None:
            raise Refusal(404, f"The lora adapter '{asked.lora_name}' cannot be found.", type="NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def _reset_prefix_cache(self, _: web.Request) -> web.StreamResponse:
        done = self._parts.core.scheduler.cache.clear()
        if self._parts.settings.kind is EngineKind.SGLANG:
            self._parts.core.publish_changes()
            return web.Response(status=200 if done else 400, text="Cache flushed." if done else "Flush cache failed.")
        return web.json_response({"success": done})

    async def _sleep(self, _: web.Request) -> web.StreamResponse:
        self._parts.core.sleep()
        return web.Response()

    async def _wake(self, _: web.Request) -> web.StreamResponse:
        self._parts.core.wake()
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": self._parts.core.asleep})
