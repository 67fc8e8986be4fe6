"""What do the rooms say of themselves when the metrics page is asked for? Gauges and counters read off, none kept."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from discovery.readings import ENDPOINT, of_bus, of_relay
from discovery.signal import SignalState
from discovery.sources.finder import of_finder
from engines.types import Tier

if TYPE_CHECKING:
    from discovery.bus import Bus
    from discovery.mirror import Mirror
    from discovery.monitor import Monitor
    from discovery.peers import Peers
    from discovery.readings import Reading
    from discovery.relay import Relay
    from discovery.sources.finder import Finder
    from engines.types import Endpoint
    from router.caches import Caches
    from router.calibration import Calibration
    from router.fleet import Fleet
    from router.gate import Gate
    from router.load import LoadBook
    from router.pairing import Pairing
    from router.server import Server
    from router.spans import Exporter


VERSION: Final = version("commutator")


def _process() -> Iterator[Reading]:
    """What the system says of this process, under the names that `prometheus-client` has for it; it reads files for them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield "process_cpu_seconds_total", "User and system time of the router.", (), [((), used.ru_utime + used.ru_stime)]
    yield "process_max_fds", "Sockets and files it may have open.", (), [((), float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))]
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    yield "process_peak_resident_memory_bytes", "Most memory it has had resident.", (), [((), float(peak))]


class Readings:
    """Reads the fleet, the caches, the load book, the event path and the listener."""

    def __init__(  # noqa: PLR0913  it reads every room once
        self,
        *,
        fleet: Fleet,
        caches: Caches,
        load: LoadBook,
        pairing: Pairing,
        calibration: Calibration,
        mirror: Mirror,
        monitor: Monitor,
        relay: Relay,
        bus: Bus,
        server: Server,
        gate: Gate,
        peers: Peers | None,
        spans: Exporter | None = None,
        finder: Finder,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._load = load
        self._pairing = pairing
        self._calibration = calibration
        self._mirror = mirror
        self._monitor = monitor
        self._relay = relay
        self._bus = bus
        self._server = server
        self._gate = gate
        self._peers = peers
        self._spans = spans
        self._finder = finder
        self._clock = clock

    def __call__(self) -> Iterator[Reading]:
        """Every family, as it stands now."""
        now = self._clock()
        endpoints = [endpoint for member in self._fleet.members.values() for endpoint in member.info.endpoints]
        yield from self._engines(now)
        yield from self._endpoints(endpoints, now)
        yield from self._calibrations()
        yield from self._events()
        yield from self._admission()
        yield from self._pairs()
        yield "router_index_blocks", "Entries in the prefix tables that KV events fill.", (), [((), self._caches.indexed)]
        yield "router_index_bytes", "Memory of all prefix tables, estimated.", (), [((), self._caches.memory_bytes())]
        yield "router_index_refused_total", "Blocks not taken in because a table was full.", (), [((), self._caches.refused)]
        yield "router_build_info", "1, with the router's version.", ("version",), [((VERSION,), 1.0)]
        spans = self._spans
        told = [] if spans is None else [(("sent",), float(spans.sent)), (("dropped",), float(spans.dropped))]
        yield "router_spans_total", "Spans of traces, by whether the collector took them.", ("outcome",), told
        yield from _process()
        yield "router_connections", "Client connections open.", (), [((), len(self._server.connections))]
        yield "router_in_progress", "Requests being handled.", (), [((), self._server.in_progress)]
        yield "router_stalled_clients_total", "Clients dropped that took nothing of their answers.", (), [((), self._server.stalled)]
        refusals = [((str(status),), float(count)) for status, count in self._server.refusals.items()]
        yield "router_refused_requests_total", "Requests answered before they were whole or valid HTTP.", ("status",), refusals

    def _engines(self, now: float) -> Iterator[Reading]:
        info = []
        failures = []
        states = []
        for member in self._fleet.members.values():
            known = member.info
            info.append(((known.id, known.kind.value, known.version, known.role.value, str(known.block_size or "")), 1.0))
            failures += [((known.id, failure), float(count)) for failure, count in member.failures.items()]
            rejection = member.rejection(now)
            states.append(((member.info.id, rejection.value if rejection else "serving" if member.serving else "joining"), 1.0))
        states += [((engine, "waiting"), 1.0) for engine in self._monitor.watched if engine not in self._fleet.members]
        yield (
            "router_engine_info",
            "1, with what each engine is.",
            ("engine", "kind", "version", "role", "block_size"),
            info,
        )
        yield "router_engine_failures_total", "Attempts at an engine that failed, by what failed.", ("engine", "failure"), failures
        yield "router_engine_state", "1 for the state each engine is in that is followed, there or not.", ("engine", "state"), states
        pushed = [
            ((engine, outcome), float(count))
            for engine, counts in self._monitor.load_reports().items()
            for outcome, count in zip(("read", "malformed"), counts, strict=True)
        ]
        yield "router_load_reports_total", "Load reports that engines pushed.", ("engine", "outcome"), pushed
        models = [((model,), float(len(self._fleet.of_model(model)))) for model in self._fleet.model_ids]
        yield "router_model_engines", "Engines serving each model.", ("model",), models

    def _endpoints(self, endpoints: list[Endpoint], now: float) -> Iterator[Reading]:
        labels = [(endpoint.engine, str(endpoint.rank)) for endpoint in endpoints]
        loads = [self._load.own(endpoint) for endpoint in endpoints]
        signals = [self._mirror.signal(endpoint, now) for endpoint in endpoints]
        yield (
            "router_signal_state",
            "1 for the state of each endpoint's KV event signal.",
            (*ENDPOINT, "state"),
            [
                ((*label, state.value), float(signal.state is state))
                for label, signal in zip(labels, signals, strict=True)
                for state in SignalState
            ],
        )
        reports = [self._load.load(endpoint, now) for endpoint in endpoints]
        for name, text, told in (
            ("router_engine_running_requests", "Requests that an endpoint says it runs.", [load.running for load in reports]),
            ("router_engine_waiting_requests", "Requests that an endpoint says wait there.", [load.waiting for load in reports]),
            ("router_engine_kv_usage_ratio", "KV cache in use, as an endpoint says.", [load.kv_usage for load in reports]),
        ):
            yield name, text, ENDPOINT, [(label, float(value)) for label, value in zip(labels, told, strict=True) if value is not None]
        for name, text, values in (
            ("router_endpoint_requests_total", "Requests sent to each endpoint.", [self._load.assigned(e) for e in endpoints]),
            ("router_active_requests", "Requests of this router in flight.", [load.requests for load in loads]),
            ("router_active_prefill_tokens", "Uncached prompt tokens not computed yet.", [load.prefill_tokens for load in loads]),
            ("router_active_blocks", "Distinct blocks of requests in flight.", [load.blocks for load in loads]),
            ("router_cached_blocks", "Blocks on the device, by KV events.", [self._caches.size(e, Tier.DEVICE) for e in endpoints]),
            ("router_predicted_blocks", "Blocks believed cached by what was sent.", [self._caches.predicted_size(e) for e in endpoints]),
        ):
            yield name, text, ENDPOINT, [(label, float(value)) for label, value in zip(labels, values, strict=True)]

    def _calibrations(self) -> Iterator[Reading]:
        tallies = [
            ((endpoint.engine, str(endpoint.rank), "kv" if by_events else "predicted"), tokens)
            for endpoint, by_events, tokens in self._calibration.read()
        ]
        for name, text, label, fields in (
            (
                "router_cached_tokens_total",
                "Prompt tokens cached, by KV events (kv) or by what was sent there: as predicted, and as the engine reported.",
                "source",
                ("predicted", "reported"),
            ),
            (
                "router_cached_tokens_error_total",
                "Of those: predicted and not reported (missing), reported and not predicted (unforeseen).",
                "kind",
                ("missing", "unforeseen"),
            ),
        ):
            values = [((*labels, field), float(getattr(tokens, field))) for labels, tokens in tallies for field in fields]
            yield name, text, (*ENDPOINT, "by", label), values

    def _admission(self) -> Iterator[Reading]:
        gate = self._gate
        waiting = [((model,), float(count)) for model, count in gate.waiting()]
        yield "router_admission_waiting", "Requests that wait for room.", ("model",), waiting
        admitted = [(("at_once",), float(gate.admitted_at_once)), (("after_waiting",), float(gate.admitted_after_waiting))]
        yield "router_admission_admitted_total", "Requests let in.", ("how",), admitted
        shed = [((reason.value,), float(count)) for reason, count in gate.shed.items()]
        shed.append((("client_left",), float(gate.gave_up)))
        yield "router_admission_shed_total", "Requests not let in, by reason.", ("reason",), shed

    def _pairs(self) -> Iterator[Reading]:
        labels = ("prefill", "decode")
        found = [((str(there), str(here)), rate) for (there, here), rate in self._pairing.throughputs()]
        yield "router_kv_link_bytes_per_second", "Throughput of each pair's handovers of late.", labels, found
        slow = [((str(there), str(here)), 1.0) for there, here in self._pairing.slow]
        yield "router_kv_link_slow", "1 for each pair whose handovers take far longer than its link or its peers say.", labels, slow

        again = [((endpoint.engine, str(endpoint.rank)), float(tokens)) for endpoint, tokens in self._pairing.computing_again.items()]
        text = "Prompt tokens of late, of each decode engine that computes itself what it is handed, by its own count."
        yield "router_decode_computed_again_tokens", text, ENDPOINT, again

    def _events(self) -> Iterator[Reading]:
        yield from of_relay(self._relay)
        copies = {(endpoint.engine, str(endpoint.rank)): counts for endpoint, counts in self._mirror.stats().items()}
        for name, text, field in (
            ("router_mirror_batches_total", "Batches applied to the index.", "batches"),
            ("router_mirror_gaps_total", "Gaps found between relay and router.", "gaps"),
            ("router_mirror_mismatches_total", "Beacons whose digest differed from ours.", "mismatches"),
            ("router_mirror_snapshots_total", "Snapshots applied.", "snapshots"),
        ):
            yield name, text, ENDPOINT, [(label, float(getattr(counts, field))) for label, counts in copies.items()]
        resyncs = [((*label, why), float(count)) for label, counts in copies.items() for why, count in counts.resyncs.items()]
        yield "router_mirror_resyncs_total", "Times that the copy of an engine was made anew, by reason.", (*ENDPOINT, "reason"), resyncs
        others = float(0 if self._peers is None else len(self._peers))
        yield "router_peers", "Other routers and relays heard of on the bus.", (), [((), others)]
        yield from of_bus(self._bus, "router")
        yield from of_finder(self._finder)
