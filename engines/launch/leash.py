"""How does a command not outlive whoever started it? Run as `python leash.py COMMAND…`, it is ended with them.

Its standard input is a pipe whose other end the starter holds. When that ends, however the starter ended (killed included), the whole
process group is killed; otherwise engines would be left behind with all their memory. SIGTERM is passed on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main() -> int:
    """Return the command's exit status: that of a shell, 128 and the signal's number, where a signal ended it."""
    ended, tell = os.pipe()
    for end in (ended, tell):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)  # noqa: S603  it is what we are for
    except OSError as error:
        sys.stderr.write(f"{sys.argv[1]}: {error.strerror}\n")
        return 127
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    poll.register(ended, select.POLLIN)
    while command.poll() is None:
        if any(descriptor != ended for descriptor, _ in poll.poll()):
            os.killpg(0, signal.SIGKILL)
        os.read(ended, 64)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


if __name__ == "__main__":
    sys.exit(main())
