"""Which engines did the user name? The list from the command line or the file, one spelling each, none twice."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engines.types import EngineSpec
from engines.urls import normalise


def static_specs(specs: Iterable[EngineSpec]) -> tuple[EngineSpec, ...]:
    """The specs with their URLs normalised, in the order given. Raises ValueError, naming the URL, for a bad or repeated one."""
    found: dict[str, EngineSpec] = {}
    for spec in specs:
        url = normalise(spec.url)
        if url in found:
            raise ValueError(f"engine {url} is given twice" + ("" if spec.url == url else f" (once as {spec.url})"))
        found[url] = msgspec.structs.replace(spec, url=url)
    return tuple(found.values())
