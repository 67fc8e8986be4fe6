"""What does a Prometheus server know of routers and engines? What it has scraped of them: their pages are asked for, and read (`planner.scrapes`).

One query brings all of them as they are, with the times at which they were scraped. Rates are not asked for: those of windows that overlap would
count each request several times, and `increase` guesses what lies before the first scrape in its window. There is something new as often as
routers are scraped. Use the bus where it can be reached.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Final

import aiohttp
import msgspec

from discovery.logs import event
from planner.scrapes import NAMES, SCRAPED_AT, Labels, Page, Scrapes
from planner.sightings import Look

TIMEOUT_S: Final = 10.0
QUERY: Final = f'label_replace(timestamp(router_build_info), "__name__", "{SCRAPED_AT}", "", "") or {{__name__=~"{"|".join(NAMES)}"}}'

_log = logging.getLogger(__name__)


class _Result(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Result]


class _Answer(msgspec.Struct):
    status: str
    data: _Data


class PrometheusObserver:
    """Asks a server; see `planner.observer.Observer`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._scrapes = Scrapes()
        self._said = ""

    async def look(self) -> Look:
        """See `Observer`. A server that is away, or has never scraped a router, is no data."""
        try:
            found = await self._ask(QUERY)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            self._say(f"{error or type(error).__name__}")
            return Look(None, {})
        self._say("")
        return self._scrapes.look(_pages(found))

    async def _ask(self, query: str) -> list[_Result]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with self._session.get(f"{self._url}/api/v1/query", params={"query": query}, timeout=timeout) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=_Answer).data.result

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            if why:
                event(_log, logging.WARNING, "Prometheus cannot be asked: no data", url=self._url, error=why)


def _pages(found: Iterable[_Result]) -> dict[str, Page]:
    """By router: its job and its address, as Prometheus calls them."""
    values: dict[str, dict[str, dict[Labels, float]]] = {}
    scraped: dict[str, float] = {}
    for one in found:
        labels = dict(one.metric)
        name, router = labels.pop("__name__", ""), f"{labels.pop('job', '')} {labels.pop('instance', '')}"
        value = float(one.value[1])
        if name == SCRAPED_AT:
            scraped[router] = value
        elif math.isfinite(value):
            values.setdefault(router, {}).setdefault(name, {})[frozenset(labels.items())] = value
    return {router: Page(at, values.get(router, {})) for router, at in scraped.items()}
