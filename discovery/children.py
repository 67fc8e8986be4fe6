"""How does a child process not outlive us? The kernel ends it, whatever became of us."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """On Linux, what the child does first: ask the kernel to end it when we end. For `preexec_fn`.

    Nothing else covers a parent that is killed: no `finally`, no `atexit` runs then, and a child left behind would keep its
    port and its memory. The library is loaded here, before the fork, since a forked child may call little. (The kernel watches the
    thread that forks, which is the loop's: the main one.)
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return ask
