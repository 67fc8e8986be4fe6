"""The one line that says what was found."""

import msgspec

from engines.probe import describe, same_models
from engines.types import EngineInfo, EngineKind, EngineSpec, KvSource, Model

TINY = Model("tiny", root="/m/tiny", card=msgspec.Raw(b'{"created":1}'))
A = EngineInfo(
    id="http://h:8000",
    spec=EngineSpec("http://h:8000"),
    kind=EngineKind.VLLM,
    version="0.32.0",
    models=(TINY, Model("ad1", parent="tiny")),
    block_size=16,
    total_blocks=1024,
    kv_sources=(KvSource(0, "tcp://h:5557", "tcp://h:5558"),),
    tokenizer="/m/tiny",
    load_path="/metrics",
)


def test_one_line_says_all_that_was_found() -> None:
    assert describe(A) == (
        "http://h:8000 is vLLM 0.32.0: tiny, ad1 (on tiny); block size 16, 1024 blocks; rank 0; "
        "KV events tcp://h:5557, replay tcp://h:5558; tokenizer /m/tiny"
    )


def test_it_says_what_is_missing_and_what_disagrees() -> None:
    bare = msgspec.structs.replace(
        A,
        spec=EngineSpec("http://h:8000", block_size=32),
        models=(),
        total_blocks=None,
        ranks=(4, 5),
        kv_sources=(),
        no_kv_events="it was started without --kv-events-config",
        tokenizer=None,
        load_path=None,
    )
    assert describe(bare) == (
        "http://h:8000 is vLLM 0.32.0: no models; block size 16 (configured as 32); ranks 4, 5; "
        "publishes no KV events: it was started without --kv-events-config; tokenizer unknown; reports no load"
    )


def test_it_says_who_binds_and_that_nothing_can_be_replayed() -> None:
    source = KvSource(0, "tcp://127.0.0.1:5557", bind=True)
    line = describe(msgspec.structs.replace(A, kv_sources=(source,), block_size=None, total_blocks=None))
    assert "block size unknown; " in line
    assert "KV events tcp://127.0.0.1:5557 (we bind, the engine connects), no replay; " in line


def test_no_key_is_ever_in_the_line() -> None:
    assert "hunter2" not in describe(msgspec.structs.replace(A, spec=EngineSpec("http://h:8000", api_key="hunter2")))


def test_models_are_the_same_whatever_their_cards_say() -> None:
    again = msgspec.structs.replace(TINY, card=msgspec.Raw(b'{"created":2}'))
    assert same_models((TINY,), (again,))
    assert not same_models((TINY,), (TINY, Model("ad1", parent="tiny")))
    assert not same_models((TINY,), (msgspec.structs.replace(TINY, root="/m/other"),))
