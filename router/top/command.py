"""What does `commutator top` do? It asks a router's admin listener for the live page's document, again and again, and draws it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from discovery.config import ConfigError
from engines.client import why_not_connected
from router.keys import BadKeys, read_token

if TYPE_CHECKING:
    from rich.console import Console

    from router.top.settings import TopSettings

PATIENCE_S: Final = 10.0


class NothingToShow(Exception):
    """The router does not tell; the message says why."""


async def run(settings: TopSettings) -> None:
    """Draw until interrupted. Raises NothingToShow when the router does not answer the first time, ConfigError without rich."""
    try:
        from rich.console import Console  # noqa: PLC0415  an extra, which other commands do without
    except ImportError:
        raise ConfigError("`commutator top` draws with rich, which is not installed: pip install 'commutator[top]'") from None
    await show(settings, Console())


async def show(settings: TopSettings, console: Console) -> None:
    """The same, on any console."""
    from rich.live import Live  # noqa: PLC0415  as above

    from router.top.screen import screen  # noqa: PLC0415  as above

    token = await asyncio.to_thread(_token, settings)
    context = await asyncio.to_thread(ssl.create_default_context, cafile=settings.tls_ca) if settings.admin.startswith("https:") else True
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context),
        timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
        headers={"authorization": f"Bearer {token}"},
        trust_env=False,
    ) as session:
        state = await _state(session, settings.admin)
        if settings.once:
            console.print(screen(state))
            return
        # Nothing is drawn but by us: rich's own refreshing is a thread.
        with Live(screen(state), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(settings.period_s)
                note = ""
                try:
                    state = await _state(session, settings.admin)
                except NothingToShow as error:
                    note = f"not of now: {error}"
                live.update(screen(state, note), refresh=True)


def _token(settings: TopSettings) -> str:
    """Raises ConfigError."""
    if settings.admin_token is not None:
        return settings.admin_token
    path = settings.admin_token_file or ""
    try:
        return read_token(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"admin_token_file: {path}: {(error.strerror or str(error)).lower()}") from None
    except (BadKeys, UnicodeDecodeError) as error:
        raise ConfigError(f"admin_token_file: {path}: {error}") from None


async def _state(session: aiohttp.ClientSession, admin: str) -> dict[str, Any]:
    try:
        async with session.get(f"{admin.rstrip('/')}/ui/state", allow_redirects=False) as answer:
            if answer.status == 401:
                raise NothingToShow(f"{admin} does not accept this admin token")
            if answer.status != 200:
                raise NothingToShow(f"{admin} answered {answer.status}: is it a router's admin address?")
            state = await answer.json()
    except TimeoutError:
        raise NothingToShow(f"{admin} has not answered within {PATIENCE_S:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise NothingToShow(f"{admin} cannot be asked: {why_not_connected(error)}") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise NothingToShow(f"{admin} cannot be asked: {error}") from None
    if not isinstance(state, dict) or "troubles" not in state:
        raise NothingToShow(f"{admin} did not answer with a router's state")
    return state
