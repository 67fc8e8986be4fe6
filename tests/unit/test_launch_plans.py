"""What is run for an engine, and what a pool makes of its GPUs."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from engines.launch.plan import BadPlan, EngineName, LaunchPlan, Pool, Ports
from engines.launch.ports import RENDEZVOUS, Held
from engines.launch.programs import Program, program
from engines.types import Connector, EngineSpec, Role

PORTS = Ports(http=8000, events=5557, replay=5558, load=5559, transfer=8998, rendezvous=9000)


def made(**plan: object) -> Program:
    return program(LaunchPlan(name="a-0", model="m", **plan), PORTS, {})  # type: ignore[arg-type]  # as each test wants it


def flag(made: Program, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


def test_vllm_publishes_events_and_says_what_was_cached() -> None:
    vllm = made()
    assert vllm.argv[:5] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m")
    assert flag(vllm, "--port") == "8000"
    assert "--enable-prompt-tokens-details" in vllm.argv
    assert json.loads(flag(vllm, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }
    assert vllm.spec == EngineSpec("http://127.0.0.1:8000", kv_events="tcp://127.0.0.1:5557", kv_replay="tcp://127.0.0.1:5558")


def test_sglang_publishes_events_and_its_load() -> None:
    sglang = made(engine=EngineName.SGLANG, tensor_parallel_size=2)
    assert sglang.argv[1:5] == ("-m", "sglang.launch_server", "--model-path", "m")
    assert json.loads(flag(sglang, "--kv-events-config"))["publisher"] == "zmq"
    assert flag(sglang, "--load-publish-endpoint") == "tcp://*:5559"
    assert flag(sglang, "--tp-size") == "2"
    assert "--dp-size" not in sglang.argv


def test_ranks_of_dp_attention_meet_where_ports_are_held_for_them() -> None:
    sglang = made(engine=EngineName.SGLANG, data_parallel_size=2, arguments=("--enable-dp-attention",))
    assert flag(sglang, "--dist-init-addr") == "127.0.0.1:9000"
    assert "--dist-init-addr" not in made(engine=EngineName.SGLANG, data_parallel_size=2).argv
    held = Held()
    try:
        with socket.socket() as another, pytest.raises(OSError):  # noqa: PT011  whichever it is
            another.bind(("127.0.0.1", held.ports.rendezvous + RENDEZVOUS - 1))
    finally:
        held.close()


@pytest.mark.parametrize(
    ("connector", "name", "variable"),
    [(None, "NixlConnector", "VLLM_NIXL_SIDE_CHANNEL_PORT"), (Connector.MOONCAKE, "MooncakeConnector", "VLLM_MOONCAKE_BOOTSTRAP_PORT")],
)
def test_a_pair_of_vllm_is_told_its_connector_and_where_the_other_finds_it(connector: Connector | None, name: str, variable: str) -> None:
    prefill, decode = made(role=Role.PREFILL, connector=connector), made(role=Role.DECODE, connector=connector)
    assert json.loads(flag(prefill, "--kv-transfer-config")) == {"kv_connector": name, "kv_role": "kv_producer"}
    assert json.loads(flag(decode, "--kv-transfer-config"))["kv_role"] == "kv_consumer"
    assert prefill.environment[variable] == "8998"
    assert (prefill.spec.role, decode.spec.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.spec.connector is decode.spec.connector is (connector or Connector.NIXL)
    assert prefill.spec.bootstrap == ("http://127.0.0.1:8998" if connector is Connector.MOONCAKE else None)


def test_a_pair_of_sglang_is_told_its_part() -> None:
    prefill, decode = made(engine=EngineName.SGLANG, role=Role.PREFILL), made(engine=EngineName.SGLANG, role=Role.DECODE)
    assert flag(prefill, "--disaggregation-mode") == "prefill"
    assert flag(prefill, "--disaggregation-bootstrap-port") == "8998"
    assert flag(decode, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in decode.argv


def test_arguments_come_last_and_json_is_merged() -> None:
    vllm = made(
        role=Role.DECODE,
        arguments=("--dtype", "float16", '--kv-transfer-config={"kv_buffer_device": "cpu"}', "--kv-events-config", '{"topic": "t"}'),
    )
    assert vllm.argv[-2:] == ("--dtype", "float16")
    assert json.loads(flag(vllm, "--kv-transfer-config"))["kv_buffer_device"] == "cpu"
    assert json.loads(flag(vllm, "--kv-events-config"))["endpoint"] == "tcp://*:5557"
    assert vllm.spec.kv_topic == "t"
    with pytest.raises(BadPlan, match=r"--kv-events-config 'no' is not a JSON object"):
        made(arguments=("--kv-events-config", "no"))


def test_an_engine_told_to_publish_nothing_is_not_said_to() -> None:
    for quiet in (
        made(arguments=("--kv-events-config", '{"enable_kv_cache_events": false}')),
        made(engine=EngineName.SGLANG, arguments=("--kv-events-config", '{"publisher": "null"}')),
    ):
        assert "--kv-events-config" not in quiet.argv
        assert quiet.spec.kv_events is None


def test_each_engine_sees_its_gpus_and_none_of_our_settings() -> None:
    environ = {"HOME": "/h", "PYTHONPATH": "/ours", "COMMUTATOR_ADMIN_TOKEN": "secret"}
    plan = LaunchPlan(name="a", model="m", gpus=(2, 3), env={"HF_HOME": "/models"})
    here = program(plan, PORTS, environ).environment
    assert here["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert here["HF_HOME"] == "/models"
    assert here["PYTHONPATH"] == "/ours"
    assert "COMMUTATOR_ADMIN_TOKEN" not in here
    elsewhere = program(LaunchPlan(name="a", model="m", python="/opt/vllm/bin/python"), PORTS, environ)
    assert elsewhere.argv[0] == "/opt/vllm/bin/python"
    assert "PYTHONPATH" not in elsewhere.environment
    assert "CUDA_VISIBLE_DEVICES" not in elsewhere.environment


def test_a_pool_gives_each_engine_its_own_gpus() -> None:
    pool = Pool(name="chat", model="m", gpus=(4, 5, 6, 7), tensor_parallel_size=2)
    pool.check()
    assert (pool.size, pool.most) == (2, 2)
    assert [(pool.plan(index).name, pool.plan(index).gpus) for index in range(2)] == [("chat-0", (4, 5)), ("chat-1", (6, 7))]
    with pytest.raises(BadPlan, match="no room for one more"):
        pool.plan(2)


def test_ranks_of_dp_attention_share_the_gpus_of_tensor_parallelism() -> None:
    pool = Pool(name="a", engine=EngineName.SGLANG, model="m", tensor_parallel_size=2, data_parallel_size=2)
    assert pool.gpus_per_engine == 4
    assert Pool(name="a", tensor_parallel_size=2, data_parallel_size=2, arguments=("--enable-dp-attention",)).gpus_per_engine == 2


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (Pool(name="a"), "no model is named"),
        (Pool(name="a", model="m", gpus=(0, 0)), "named twice"),
        (Pool(name="a", model="m", gpus=(0, 1, 2), tensor_parallel_size=2), "cannot be divided"),
        (Pool(name="a", model="m", gpus=(0, 1), replicas=3), "do not fit"),
        (Pool(name="a", model="m", connector=Connector.NIXL), "has no effect"),
        (Pool(name="a", model="m", role=Role.PREFILL, connector=Connector.ROOMS), "SGLang's own"),
    ],
)
def test_what_cannot_be_started_is_said_before(pool: Pool, why: str) -> None:
    with pytest.raises(BadPlan, match=why):
        pool.check()
