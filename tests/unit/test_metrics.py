"""Metrics pages: what is there is read, what is not is unknown and never 0."""

from pathlib import Path

import msgspec
import pytest

from engines.metrics import CacheConfig, EngineLoad, read_boot, read_cache_config, read_load, read_load_stat, read_loads, samples
from engines.types import EngineKind
from tests.frames import recorded

DATA = Path(__file__).parents[1] / "data" / "endpoints"
VLLM = (DATA / "vllm" / "metrics.txt").read_text()
SGLANG = (DATA / "sglang" / "metrics.txt").read_text()


def test_a_real_vllm_page_is_read() -> None:
    assert read_load(EngineKind.VLLM, VLLM) == {0: EngineLoad(running=0, waiting=0, kv_usage=0.0, asleep=False)}
    assert read_cache_config(VLLM) == {0: CacheConfig(block_size=32, total_blocks=12, dtype="auto")}
    assert read_boot(VLLM) == 1795954074.36


def test_a_real_sglang_page_is_read() -> None:
    assert read_load(EngineKind.SGLANG, SGLANG) == {0: EngineLoad(running=0, waiting=0, kv_usage=0.0)}
    assert read_boot(SGLANG) is None


@pytest.mark.parametrize("kind", list(EngineKind))
def test_R25_what_is_not_reported_is_unknown_and_not_zero(kind: EngineKind) -> None:
    assert read_load(kind, "") == {}
    assert read_load(kind, "<html>404 page not found</html>") == {}
    assert read_load(EngineKind.VLLM, 'vllm:num_requests_running{engine="0"} 3.0\n') == {0: EngineLoad(running=3)}
    assert read_load(EngineKind.VLLM, 'vllm:num_requests_running{engine="0"} NaN\n') == {}
    assert read_boot("process_start_time_seconds +Inf\n") is None


def test_a_pushed_report_is_read_whatever_is_added_behind_it() -> None:
    pushed = [message for name in ("plain_tp1", "dp2_rank1") for message in recorded(f"sglang/{name}.jsonl") if not message.is_kv]
    assert pushed
    for message in pushed:
        _, running, waiting, used, total, *_ = message.decoded
        assert read_load_stat(message.payload) == EngineLoad(running, waiting, used / total)
        assert read_load_stat(msgspec.msgpack.encode([*message.decoded, "new"])) == read_load_stat(message.payload)
    assert read_load_stat(msgspec.msgpack.encode(["LoadStat", 1, 2, 0, 0])) == EngineLoad(1, 2, None)
    assert read_load_stat(msgspec.msgpack.encode(["LoadStat", 1, 2, 9, 8])) == EngineLoad(1, 2, 1.0)


def test_each_rank_is_read_under_its_own_number() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} 0.{rank}\n'
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="{rank}00"}} 1.0\n'
        for rank in (5, 4)
    )
    assert read_load(EngineKind.VLLM, page) == {4: EngineLoad(4, None, 0.4), 5: EngineLoad(5, None, 0.5)}
    assert read_cache_config(page) == {4: CacheConfig(16, 400), 5: CacheConfig(16, 500)}


def test_sglang_ranks_and_their_tensor_parallel_processes_are_told_apart() -> None:
    page = (
        'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 2.0\n'
        'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3.0\n'
        'sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 7.0\n'
    )
    assert read_load(EngineKind.SGLANG, page) == {0: EngineLoad(running=3), 1: EngineLoad(running=7)}


def test_the_older_name_of_kv_usage_is_read_where_the_newer_is_absent() -> None:
    old = 'vllm:gpu_cache_usage_perc{engine="0"} 0.9\n'
    assert read_load(EngineKind.VLLM, old)[0].kv_usage == 0.9
    assert read_load(EngineKind.VLLM, old + 'vllm:kv_cache_usage_perc{engine="0"} 0.1\n')[0].kv_usage == 0.1


def test_the_full_attention_block_size_is_preferred_to_the_configured_one() -> None:
    page = 'vllm:cache_config_info{block_size="16",effective_attention_block_size="2096",engine="0",num_gpu_blocks="None"} 1.0\n'
    assert read_cache_config(page) == {0: CacheConfig(block_size=2096, total_blocks=None)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("up 1", [({}, 1.0)]),
        ("up{} 1", [({}, 1.0)]),
        ('up{a="b",} 1.5e3 1700000000', [({"a": "b"}, 1500.0)]),
        (r'up{a="x\"}\\\n",b=""} 2', [({"a": 'x"}\\\n', "b": ""}, 2.0)]),
        ("up_total 1", []),
        ("# TYPE up gauge", []),
        ("xup 1", []),
        ('up{a="b" 1', []),
        ("up{a=b} 1", []),
        ("up ", []),
        ("up one", []),
    ],
)
def test_a_line_is_read_or_skipped(line: str, expected: list[object]) -> None:
    assert list(samples(line, "up")) == expected
    assert list(samples(f"other 1\n{line}\nother 2\n", "up")) == expected


def test_sglang_loads_are_read_by_rank() -> None:
    answer = b'{"loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,"token_usage":0.25,"new":{}},{"dp_rank":1}]}'
    assert read_loads(answer) == {0: EngineLoad(3, 1, 0.25), 1: EngineLoad()}
    assert read_loads(b"[]") == {}
    assert read_loads(b"not json") == {}


def test_a_vllm_engine_is_asleep_when_it_is_not_awake_at_any_level() -> None:
    state = 'vllm:engine_sleep_state{engine="%d",model_name="tiny",sleep_state="%s"} %.1f\n'
    page = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 0.0\n'
    page += state % (0, "awake", 0) + state % (0, "weights_offloaded", 1) + state % (0, "discard_all", 0)
    page += state % (1, "awake", 1) + state % (1, "weights_offloaded", 0) + state % (1, "discard_all", 0)
    assert {rank: load.asleep for rank, load in read_load(EngineKind.VLLM, page).items()} == {0: True, 1: False}
    paused = page.replace('"weights_offloaded"} 1.0', '"weights_offloaded"} 0.0')
    assert read_load(EngineKind.VLLM, paused)[0].asleep is True
