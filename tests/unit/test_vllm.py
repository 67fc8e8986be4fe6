"""vLLM's answers, and what they mean."""

from pathlib import Path

import msgspec
import pytest

from engines import vllm
from engines.types import EngineInfo, EngineKind, EngineSpec, KvSource

DATA = Path(__file__).parents[1] / "data" / "endpoints" / "vllm"
SOURCE = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"%s","replay_endpoint":"%s","topic":"kv"}'


def sources(*endpoints: tuple[str, str], host: str = "10.0.0.7", first: int = 0) -> tuple[KvSource, ...]:
    ranks = ",".join(f'"{rank}":{SOURCE % pair}' for rank, pair in enumerate(endpoints, first))
    return vllm.read_kv_sources(f"{{{ranks}}}".encode(), host)


def engine(*ranks: int) -> EngineInfo:
    return EngineInfo(id="http://h:1", spec=EngineSpec("http://h:1"), kind=EngineKind.VLLM, version="0.32.0", models=(), ranks=ranks)


def test_its_version_answer_is_recognised() -> None:
    assert vllm.recognise(b'{"version":"0.32.0"}') == "0.32.0"


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b'"0.32.0"', b"{}", b'{"version":3}', b'{"x":' + b"[" * 100_000])
def test_another_answer_is_not(answer: bytes) -> None:
    assert vllm.recognise(answer) is None
    assert vllm.read_models(answer) is None
    assert vllm.owners(answer) == frozenset()
    assert vllm.read_kv_sources(answer, "h") == ()


def test_real_models_are_read_and_their_cards_kept_as_they_are() -> None:
    answer = (DATA / "models.json").read_bytes()
    models = vllm.read_models(answer)
    assert models is not None
    (model,) = models
    assert (model.id, model.root, model.parent, model.max_model_len) == ("tiny", "models/tiny", None, 256)
    assert bytes(model.card) in answer
    assert msgspec.json.decode(model.card)["permission"][0]["allow_sampling"] is True
    assert vllm.owners(answer) == {"vllm"}


def test_the_tokenizer_is_with_the_base_model_and_not_with_an_adapter() -> None:
    models = vllm.read_models(
        b'{"data":[{"id":"ad1","root":"/lora/ad1","parent":"tiny","max_model_len":null},{"id":"tiny","root":"/m/tiny","parent":null}]}'
    )
    assert models is not None
    assert [model.id for model in models] == ["ad1", "tiny"]
    assert vllm.weights_of(models) == "/m/tiny"


def test_a_card_that_cannot_be_read_costs_only_itself() -> None:
    models = vllm.read_models(b'{"data":[{"id":7},"x",{"id":"tiny"}]}')
    assert models is not None
    assert [model.id for model in models] == ["tiny"]


def test_the_real_kv_sources_are_read_with_a_host_that_can_be_reached() -> None:
    found = vllm.read_kv_sources((DATA / "kv_event_sources.json").read_bytes(), "10.0.0.7")
    assert found == (KvSource(0, "tcp://10.0.0.7:5601", "tcp://10.0.0.7:5701", topic="kv-events", bind=False),)


def test_R28_ranks_4_to_7_are_known_by_their_own_numbers() -> None:
    found = sources(*((f"tcp://*:{5600 + rank}", f"tcp://*:{5700 + rank}") for rank in range(4, 8)), first=4)
    assert [(source.rank, source.events) for source in found] == [(rank, f"tcp://10.0.0.7:{5600 + rank}") for rank in range(4, 8)]


def test_R28_a_rank_is_addressed_by_its_place_among_the_engines_own() -> None:
    assert [vllm.pin_headers(engine(4, 5, 6, 7), rank) for rank in (4, 7)] == [{"X-data-parallel-rank": "0"}, {"X-data-parallel-rank": "3"}]
    assert vllm.pin_headers(engine(0, 1), 1) == {"X-data-parallel-rank": "1"}


def test_R28_no_other_rank_is_ever_addressed() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        vllm.pin_headers(engine(4, 5, 6, 7), 0)


def test_R28_no_header_goes_to_an_engine_with_one_rank_or_unknown_ones() -> None:
    assert vllm.pin_headers(engine(0), 0) == {}
    assert vllm.pin_headers(engine(4), 4) == {}


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://0.0.0.0:5557", "tcp://router:5557"])
def test_where_the_engine_names_a_host_it_connects_and_we_bind(endpoint: str) -> None:
    (source,) = sources((endpoint, "tcp://*:5558"))
    assert (source.events, source.bind) == (endpoint, True)
    assert source.replay == "tcp://10.0.0.7:5558"


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::]:5557", "tcp://:::5557"])
def test_where_the_engine_binds_everywhere_we_connect_to_its_host(endpoint: str) -> None:
    (source,) = sources((endpoint, "tcp://0.0.0.0:5558"), host="fd00::7")
    assert source == KvSource(0, "tcp://[fd00::7]:5557", "tcp://[fd00::7]:5558", topic="kv", bind=False)


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b'{"0":{"enable_kv_cache_events":false,"publisher":"null"}}',
        b'{"0":{"enable_kv_cache_events":true,"publisher":"null"}}',
        b'{"zero":{}}',
    ],
)
def test_an_engine_that_publishes_nothing_has_no_source(answer: bytes) -> None:
    assert vllm.read_kv_sources(answer, "h") == ()


@pytest.mark.parametrize(
    ("version", "tells"),
    [
        ("0.32.0", True),
        ("0.26.1", True),
        ("1.0", True),
        ("0.32.0+cpu", True),
        ("0.25.3", False),
        ("0.9", False),
        ("dev", False),
        ("", False),
    ],
)
def test_which_versions_can_be_had_to_tell_again_what_they_find_cached(version: str, tells: bool) -> None:
    info = msgspec.structs.replace(engine(0), version=version)
    assert vllm.tells_again(info) is tells
    assert not vllm.tells_again(msgspec.structs.replace(info, kind=EngineKind.SGLANG))
