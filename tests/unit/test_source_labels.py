"""What labels, containers, pods and endpoint slices say of engines."""

from __future__ import annotations

from typing import Any

import pytest

from discovery.config import ConfigError
from discovery.sources import docker
from discovery.sources.dns import engine_at
from discovery.sources.file import read_engines
from discovery.sources.labels import DOCKER, own, spec_of
from discovery.sources.objects import KINDS, found_in
from engines.types import Connector, EngineSpec, Role


def test_every_key_of_an_engine_can_be_a_label() -> None:
    labels = {
        "commutator.port": "8000",
        "commutator.scheme": "https",
        "commutator.role": "prefill",
        "commutator.connector": "mooncake",
        "commutator.bootstrap": "8998",
        "commutator.link": "100GbE",
        "commutator.group": "rack1",
        "commutator.kv-events": "5557",
        "commutator.kv-replay": "tcp://10.0.0.8:5558",
        "commutator.kv-topic": "kv",
        "commutator.block-size": "16",
        "commutator.tokenizer": "/models/m",
        "commutator.api-key-env": "VLLM_KEY",
        "com.docker.compose.project": "p",
    }
    assert spec_of("10.0.0.7", None, own(labels, DOCKER), {"VLLM_KEY": "sk"}) == EngineSpec(
        "https://10.0.0.7:8000",
        role=Role.PREFILL,
        connector=Connector.MOONCAKE,
        bootstrap="http://10.0.0.7:8998",
        link="100GbE",
        group="rack1",
        kv_events="tcp://10.0.0.7:5557",
        kv_replay="tcp://10.0.0.8:5558",
        kv_topic="kv",
        block_size=16,
        tokenizer="/models/m",
        api_key="sk",
    )


@pytest.mark.parametrize(
    ("port", "keys", "why"),
    [
        (None, {"rol": "prefill"}, "unknown key 'rol'; did you mean 'role'"),
        (None, {}, "no port is named"),
        (None, {"port": "http"}, "port 'http' is none"),
        (8000, {"role": "both"}, "role"),
        (8000, {"api-key-env": "NONE"}, "NONE, which is not set"),
        (8000, {"api-key-env": "A", "api-key": "sk"}, "both given"),
        (8000, {"scheme": "ftp"}, "must start with http"),
    ],
)
def test_a_label_that_is_wrong_is_named(port: int | None, keys: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        spec_of("10.0.0.7", port, keys, {"A": "sk"})


def container(name: str, networks: dict[str, str], **labels: str) -> dict[str, Any]:
    return {
        "Names": [f"/{name}"],
        "Labels": {f"commutator.{key}": value for key, value in labels.items()},
        "NetworkSettings": {"Networks": {network: {"IPAddress": address} for network, address in networks.items()}},
    }


def test_a_container_is_where_its_network_says() -> None:
    found = docker.found_in(
        [
            container("one", {"a": "172.18.0.2"}, port="8000"),
            container("two", {"a": "172.18.0.3", "b": "172.19.0.3"}, port="8000", network="b", role="decode"),
            container("on the host", {"host": ""}, port="8001"),
            container("elsewhere", {"a": "172.18.0.4"}, port="8000", network="c"),
            container("nowhere", {"a": ""}, port="8000"),
            container("again", {"a": "172.18.0.2"}, port="8000"),
        ],
        {},
    )
    assert found.specs == (
        EngineSpec("http://172.18.0.2:8000"),
        EngineSpec("http://172.19.0.3:8000", role=Role.DECODE),
        EngineSpec("http://127.0.0.1:8001"),
    )
    assert [fault.partition(":")[0] for fault in found.faults] == ["container elsewhere", "container nowhere", "container again"]
    assert "it is not in the network 'c'; it is in a" in found.faults[0]


def pod(
    name: str, ip: str, *, ports: tuple[tuple[str | None, int], ...] = ((None, 8000),), phase: str = "Running", **meta: object
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", **meta},
        "spec": {"containers": [{"ports": [{"containerPort": port} | ({"name": called} if called else {}) for called, port in ports]}]},
        "status": {"phase": phase, "podIP": ip},
    }


def test_pods_that_run_and_are_not_to_end_are_engines() -> None:
    found = found_in(
        KINDS["pods"],
        [
            pod("a", "10.0.0.1"),
            pod("b", "10.0.0.2", ports=(("metrics", 9000), ("http", 8080)), labels={"commutator.io/role": "prefill"}),
            pod(
                "c",
                "10.0.0.3",
                annotations={"commutator.io/port": "8001", "commutator.io/role": "decode"},
                labels={"commutator.io/role": "prefill"},
            ),
            pod("ending", "10.0.0.4", deletionTimestamp="2026-01-01T00:00:00Z"),
            pod("pending", "10.0.0.5", phase="Pending"),
            pod("unclear", "10.0.0.6", ports=(("one", 1), ("two", 2))),
            pod("six", "fd00::6"),
        ],
        {},
    )
    assert [(spec.url, spec.role) for spec in found.specs] == [
        ("http://10.0.0.1:8000", None),
        ("http://10.0.0.2:8080", Role.PREFILL),
        ("http://10.0.0.3:8001", Role.DECODE),
        ("http://[fd00::6]:8000", None),
    ]
    assert found.faults == ("pods ns/unclear: no port is named, and it is not clear which one is meant",)


def test_endpoints_that_are_not_ending_are_engines_once_each() -> None:
    item = {
        "metadata": {"name": "vllm-x1", "namespace": "ns", "labels": {"commutator.io/kv-events": "5557"}},
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [
            {"addresses": ["10.0.0.1", "10.0.0.9"], "conditions": {"ready": True}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": False, "terminating": True}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": False}},
        ],
    }
    found = found_in(KINDS["endpointslices"], [item, item | {"metadata": item["metadata"] | {"name": "vllm-x2"}}], {})  # type: ignore[operator]
    assert [(spec.url, spec.kv_events) for spec in found.specs] == [
        ("http://10.0.0.1:8000", "tcp://10.0.0.1:5557"),
        ("http://10.0.0.3:8000", "tcp://10.0.0.3:5557"),
    ]
    assert KINDS["pods"].path("ns") == "/api/v1/namespaces/ns/pods"
    assert KINDS["endpointslices"].path("*") == "/apis/discovery.k8s.io/v1/endpointslices"


def test_what_is_said_of_a_name_holds_at_each_of_its_addresses() -> None:
    named = EngineSpec("http://vllm:8000", role=Role.PREFILL, bootstrap="http://*:8998", kv_events="tcp://*:5557", kv_replay="tcp://x:5558")
    assert engine_at(named, "fd00::7", 8001) == EngineSpec(
        "http://[fd00::7]:8001",
        role=Role.PREFILL,
        bootstrap="http://[fd00::7]:8998",
        kv_events="tcp://[fd00::7]:5557",
        kv_replay="tcp://x:5558",
    )


def test_a_file_has_lines_or_tables_and_nothing_else() -> None:
    assert read_engines('engine = ["http://h:8000,role=decode"]') == (EngineSpec("http://h:8000", role=Role.DECODE),)
    assert read_engines('[[engine]]\nurl = "http://H:8000/"\n') == (EngineSpec("http://h:8000"),)
    assert read_engines("") == ()
    for text, why in (
        ("engines = []", "unknown key engines"),
        ('engine = ["http://h:1", "http://h:1/"]', "given twice"),
        ("engine = 3", "a list"),
        ("engine = [3]", "neither"),
    ):
        with pytest.raises((ConfigError, ValueError), match=why):
            read_engines(text)
