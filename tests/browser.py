"""How does a test use a real browser? Chromium, headless, over the DevTools protocol.

async with browser() as chromium, chromium.page("http://127.0.0.1:8081/ui", width=1200) as page:
    await page.until("document.querySelector('h1')")
    assert await page.evaluate("document.title") == "Commutator"
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.waiting import until

PATIENCE_S = 90.0
"""A browser is several processes that start from a cold disk."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers seldom allow what the sandbox needs, and only our own page is loaded
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def chromium_path() -> str | None:
    """Where Chromium is on this machine; None where it is not (`scripts/setup-browser` installs Debian's)."""
    named = os.environ.get("COMMUTATOR_BROWSER")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class BrowserError(Exception):
    """The browser did not do what it was asked."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requested: list[str] = []
        """Every URL it has asked the network for."""
        self.complaints: list[str] = []
        """Errors: of scripts, of the console, of the page's own policy."""

    async def listen(self) -> None:
        async for message in self._socket:
            told = msgspec.json.decode(message.data)
            if "id" in told:
                waiting = self._waiting.pop(told["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
                continue
            params = told.get("params", {})
            match told["method"]:
                case "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                    self.complaints.append(str(params["args"]))

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """A command of the protocol; its result."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(msgspec.json.encode({"id": number, "method": method, "params": params}).decode())
        async with asyncio.timeout(PATIENCE_S):
            told = await waiting
        if "error" in told:
            raise BrowserError(f"{method}: {told['error']}")
        return dict(told["result"])

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401  JSON
        """What a JavaScript expression is, or is resolved to."""
        told = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise BrowserError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait for it to be true."""

        async def true() -> bool:
            return bool(await self.evaluate(f"Boolean({expression})"))

        await until(true, deadline_s=PATIENCE_S, what=expression)

    async def text(self, selector: str) -> str:
        """What a reader sees there."""
        return str(await self.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''"))

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """A key, down and up: Tab, Enter."""
        code = {"Tab": 9, "Enter": 13, "Space": 32}[key]
        known = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        typed = {"Enter": {"text": "\r"}, "Space": {"text": " "}}.get(key, {})
        await self.send("Input.dispatchKeyEvent", type="keyDown", **known, **typed)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    async def wide(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """As on a screen of this size, by day or by night."""
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])


class Chromium:
    """A browser that runs."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    @contextlib.asynccontextmanager
    async def page(self, url: str, width: int = 1200) -> AsyncIterator[Page]:
        """A tab that shows `url`, with nothing remembered of others."""
        async with self._session.put(f"{self._url}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket, asyncio.TaskGroup() as group:
            page = Page(socket)
            listening = group.create_task(page.listen())
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.send(f"{domain}.enable")
            await page.wide(width)
            await page.send("Page.navigate", url=url)
            await page.until(f"location.href === {url!r} && document.readyState === 'complete'")
            try:
                yield page
            finally:
                with contextlib.suppress(BrowserError, ConnectionError, TimeoutError):
                    await page.send("Page.close")
                listening.cancel()


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Chromium]:
    """Chromium while the block runs."""
    path = chromium_path()
    if path is None:
        raise BrowserError("there is no Chromium")
    with tempfile.TemporaryDirectory(prefix="commutator-browser-", ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            path,
            *FLAGS,
            f"--user-data-dir={home}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"HOME": home},
        )
        try:
            told = Path(home, "DevToolsActivePort")

            def started() -> bool:
                if process.returncode is not None:
                    raise BrowserError(f"{path} ended with code {process.returncode}")
                return told.exists() and "\n" in told.read_text()

            await until(started, deadline_s=PATIENCE_S, what="the browser has started")
            port = told.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                yield Chromium(f"http://127.0.0.1:{port}", session)
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 10)
                except TimeoutError:
                    process.kill()
                    await process.wait()
