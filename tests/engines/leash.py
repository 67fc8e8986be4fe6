"""Runs a command that must not outlive whoever started it: python leash.py COMMAND…

Its standard input is a pipe whose other end the starter holds. When that ends, however the starter ended (a killed test run included), the
whole process group is killed; otherwise a killed run would leave engines of 1.5 GB each behind. SIGTERM is passed on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main() -> int:
    """Return the command's exit status."""
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    ended = os.pidfd_open(command.pid)
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    poll.register(ended, select.POLLIN)
    if ended not in {descriptor for descriptor, _ in poll.poll()}:
        os.killpg(0, signal.SIGKILL)
    return command.wait()


if __name__ == "__main__":
    sys.exit(main())
