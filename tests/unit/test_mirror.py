from __future__ import annotations

import asyncio
import itertools

from discovery.bus import Bus
from discovery.feed import PIECE_BYTES, Feed
from discovery.mirror import Mirror
from engines.blocks import KEY_BYTES
from engines.events import KvBatch, Stored
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource
from router.caches import Caches

ENGINE = "http://e:1"
ENDPOINT = Endpoint(ENGINE)
INFO = EngineInfo(ENGINE, EngineSpec(ENGINE), EngineKind.VLLM, "0", (), kv_sources=(KvSource(0, "tcp://e:2"),))


async def test_what_happens_while_a_large_cache_is_taken_in_does_not_pile_up_behind_it() -> None:
    """A busy engine brings many changes in one pass of the loop: taken in one a pass, its copy would be complete when it falls silent."""
    pieces, changes = 4, 8
    caches, numbers, epochs = Caches(), itertools.count(), itertools.count()
    caches.add(ENDPOINT)
    mirror = Mirror(Bus(), "test", caches)
    feed = Feed(ENDPOINT, None, lambda: f"life.{next(epochs)}", None, copy=mirror)
    feed.restarted("joined")
    feed.caught_up()

    def store(blocks: int) -> None:
        tokens = [next(numbers) for _ in range(blocks)]
        feed.batch(KvBatch(0.0, 0, [Stored([*tokens], None, tokens, 1)]))

    store(pieces * PIECE_BYTES // KEY_BYTES)
    mirror.attach(feed)
    mirror.expect(INFO)
    assert not mirror.ready(ENDPOINT), "a large cache is not taken in at once"
    for _ in range(2 * pieces):
        for _ in range(changes):
            store(1)
        await asyncio.sleep(0)
    assert mirror.ready(ENDPOINT)
    assert caches.size(ENDPOINT) == feed.counts.blocks
