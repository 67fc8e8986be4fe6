"""What `commutator up` makes of what it is told."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import pytest

from discovery.config import ConfigError, in_force, load
from discovery.up.commands import toml
from discovery.up.settings import UpSettings
from engines.launch.plan import EngineName, Pool
from engines.types import EngineSpec, Role


def told(*argv: str, file: str = "", environ: Mapping[str, str] | None = None) -> UpSettings:
    flags = ("--config", "up.toml", *argv) if file else argv
    return load(UpSettings, argv=flags, environ=environ or {}, read_file=lambda _: file).settings


def test_one_engine_on_each_gpu() -> None:
    (pool,) = told("--model", "M", "--gpus", "0,1").pools
    assert pool == Pool(name="engine", model="M", gpus=(0, 1))
    assert pool.size == 2


def test_one_engine_on_two_gpus() -> None:
    (pool,) = told("--model", "M", "--gpus", "0,1", "--tensor-parallel-size", "2", "--launch", "sglang").pools
    assert (pool.size, pool.engine, pool.plan(0).gpus) == (1, EngineName.SGLANG, (0, 1))


def test_a_pair() -> None:
    pools = told("--model", "M", "--prefill-gpus", "0", "--decode-gpus", "1,2").pools
    assert [(pool.role, pool.gpus, pool.size) for pool in pools] == [(Role.PREFILL, (0,), 1), (Role.DECODE, (1, 2), 2)]


def test_arguments_are_quoted_as_in_a_shell() -> None:
    (pool,) = told("--model", "M", "--arguments=--max-model-len 8192 --dtype 'float 16'").pools
    assert pool.arguments == ("--max-model-len", "8192", "--dtype", "float 16")


FILE = """
[[pool]]
name = "prefill"
engine = "sglang"
model = "M"
role = "prefill"
gpus = [0]
env = { HF_HOME = "/models" }

[[pool]]
name = "decode"
engine = "sglang"
model = "M"
role = "decode"
gpus = [1, 2]
tensor_parallel_size = 2

[serve]
policy = "least-loaded"
kv = { overlap_score_credit = 2 }
"""


def test_pools_and_what_the_router_is_told_come_from_a_file() -> None:
    settings = told(file=FILE)
    assert [(pool.name, pool.role, pool.size) for pool in settings.pools] == [("prefill", Role.PREFILL, 1), ("decode", Role.DECODE, 1)]
    assert settings.pools[0].env == {"HF_HOME": "/models"}
    assert settings.serve == {"policy": "least-loaded", "kv": {"overlap_score_credit": 2}}


def test_a_table_is_json_where_there_is_no_toml() -> None:
    settings = told("--pool", '{"name": "a", "engine": "simulated", "replicas": 2}', environ={"COMMUTATOR_SERVE": '{"policy": "random"}'})
    assert settings.pools == (Pool(name="a", engine=EngineName.SIMULATED, replicas=2),)
    assert settings.serve == {"policy": "random"}


def test_a_planner_may_be_told_things_and_not_what_follows_from_the_rest() -> None:
    assert told("--model", "M").plan is None
    assert told("--model", "M", "--plan", "{}").plan == {}
    with pytest.raises(ConfigError, match="`actuator` has no effect in it"):
        told("--model", "M", "--plan", '{"actuator": "dry-run"}')


def test_what_is_in_force_can_be_loaded_again() -> None:
    first = load(UpSettings, argv=("--config", "up.toml"), environ={}, read_file=lambda _: FILE)
    assert told(file=in_force(first)).pools == first.settings.pools


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "no engine is described; name a model"),
        (["--model", "M", "--prefill-gpus", "0"], "a pair needs both"),
        (["--model", "M", "--gpus", "0", "--replicas", "2"], "has no effect with GPUs"),
        (["--model", "M", "--gpus", "0,1,2", "--tensor-parallel-size", "2"], "cannot be divided"),
        (["--model", "M", "--gpus", "all"], "'all' is not allowed"),
        (["--model", "M", "--gpus", "3", "--prefill-gpus", "0", "--decode-gpus", "1"], "has no effect beside prefill_gpus"),
        (["--model", "M", "--arguments='"], "cannot be taken apart"),
        (["--pool", '{"name": "a", "model": "M"}', "--model", "M"], "has no effect beside pools"),
        (["--pool", '{"name": "a", "model": "M"}', "--pool", '{"name": "a", "model": "M"}'], "2 pools are named 'a'"),
        (["--pool", '{"name": "a", "model": "M", "role": "prefill"}'], "only with decode engines"),
        (["--pool", '{"name": "a", "modle": "M"}'], "--pool: table 1: unknown key 'modle'; did you mean 'model'\\?"),
        (["--pool", '{"model": "M"}'], "--pool: table 1: `name` is missing"),
        (
            ["--pool", '{"name": "a", "gpus": ["x"]}'],
            "table 1: gpus: the value is not allowed; allowed is a list, each item a whole number",
        ),
        (["--pool", "no"], "a table \\(outside of the file: JSON\\)"),
        (["--model", "M", "--serve", '{"port": 1}'], "`port` has no effect in it: `port` says, outside of it"),
    ],
)
def test_what_would_not_work_is_an_error(argv: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        told(*argv)


def test_a_configuration_is_written_as_it_is() -> None:
    value = {"engine": [EngineSpec("http://h:1", role=Role.DECODE, api_key="sk-secret")], "kv": {"a": 1.5}, "on": True, "name": 'a"b\\é'}
    written = "".join(f"{key} = {toml(item)}\n" for key, item in value.items())
    assert tomllib.loads(written) == {
        "engine": [{"url": "http://h:1", "role": "decode", "api_key": "sk-secret"}],
        "kv": {"a": 1.5},
        "on": True,
        "name": 'a"b\\é',
    }
