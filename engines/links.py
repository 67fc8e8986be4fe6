"""How many bytes per second does a link carry, in one direction? Named links by their nominal rate, anything else as written.

100GbE       12.5 GB/s nominal, taken at 80 %: 10 GB/s
104MB/s      as written; 1.5GiB/s and 10Gb/s (bits) are rates too
"""

from __future__ import annotations

import difflib
import re
from typing import Final

import msgspec

EFFICIENCY: Final = 0.8
"""Share of a named link's nominal rate that a transfer is taken to reach: an assumption. Headers of TCP and Ethernet alone leave 0.95
(1,460 of 1,538 bytes); a published transfer at 104 MB/s is 0.83 of 1GbE."""

_GIGABITS: Final = {
    **{f"{rate}GbE": rate for rate in (1, 2.5, 10, 25, 40, 50, 100, 200, 400, 800)},
    "EDR": 100,
    "HDR": 200,
    "NDR": 400,
    "XDR": 800,
}
_GIGABYTES: Final = {"NVLink3": 300, "NVLink4": 450, "NVLink5": 900, "NVLink": 450, "PCIe3": 15.75, "PCIe4": 31.5, "PCIe5": 63}
"""One direction of a GPU: half of what NVLink is sold with (600, 900, 1,800 GB/s); PCIe with 16 lanes. `NVLink` is an H100's or H200's."""

NOMINAL: Final[dict[str, float]] = {name: rate * 1e9 / 8 for name, rate in _GIGABITS.items()} | {
    name: rate * 1e9 for name, rate in _GIGABYTES.items()
}
"""Bytes per second by name."""

_BY_LOWER_NAME: Final = {name.lower(): name for name in NOMINAL}
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B|b)(?:/s|ps)")
_POWER: Final = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


class UnknownLink(ValueError):
    """Neither a link's name nor a rate; the message says what is."""


class Link(msgspec.Struct, frozen=True):
    """A link as it was named, and what is taken to come through it."""

    name: str
    bytes_per_s: float
    efficiency: float
    """1 where the rate was given."""


def parse_link(text: str) -> Link:
    """The link that `text` names or measures. Raises UnknownLink."""
    if name := _BY_LOWER_NAME.get(text.strip().lower()):
        return Link(name, NOMINAL[name] * EFFICIENCY, EFFICIENCY)
    if match := _RATE.fullmatch(text.strip()):
        number, prefix, binary, unit = match.groups()
        scale: int = (1024 if binary else 1000) ** _POWER[prefix.replace("K", "k")]
        rate = float(number) * scale / (8 if unit == "b" else 1)
        if rate > 0:
            return Link(text.strip(), rate, 1.0)
        raise UnknownLink(f"{text!r} carries nothing")
    near = difflib.get_close_matches(text.strip().lower(), _BY_LOWER_NAME, n=1)
    hint = f"; did you mean {_BY_LOWER_NAME[near[0]]!r}?" if near else ""
    raise UnknownLink(f"{text!r} is neither a rate such as 104MB/s nor one of {', '.join(NOMINAL)}{hint}")
