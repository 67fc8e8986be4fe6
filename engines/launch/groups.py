"""Which processes of a group live? Told by /proc; where there is none, by whether a signal would reach one."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def members(group: int) -> list[Path]:
    """The living processes of a group, as folders of /proc."""
    return [stat.parent for stat in PROC.glob("[0-9]*/stat") if _group_of(stat) == group]


def lives(group: int) -> bool:
    """Whether any process of the group does. Zombies do not: nobody may be there to reap them."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return bool(members(group)) if PROC.joinpath("self").exists() else True


def _group_of(stat: Path) -> int | None:
    try:
        state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(group)
