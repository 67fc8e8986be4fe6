"""Who answers under `/ui`, on the admin listener? The page is three files that say nothing; the state they show needs the admin token.

    GET /ui  /ui/page.css  /ui/page.js     open: whoever may not see the state gets a form that asks for the token
    GET /ui/state                          the document, as JSON; with the token only

The token is a header that no browser adds by itself, so another site's page can neither ask in an operator's name nor read what comes.
The page may load and ask nothing but what is served here, and nobody may frame it: its policy says so to the browser.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec

from router.errand import in_task

if TYPE_CHECKING:
    from router.exchange import Exchange
    from router.server import Handler

STATE: Final = b"/ui/state"
_PLACES: Final = {
    b"/ui": ("index.html", b"text/html; charset=utf-8"),
    b"/ui/": ("index.html", b"text/html; charset=utf-8"),
    b"/ui/page.css": ("page.css", b"text/css; charset=utf-8"),
    b"/ui/page.js": ("page.js", b"text/javascript; charset=utf-8"),
    b"/ui/plots.js": ("plots.js", b"text/javascript; charset=utf-8"),
}
PAGE_PATHS: Final = frozenset(_PLACES)
_FILES: Final = {path: (files("router.ui").joinpath(name).read_bytes(), kind) for path, (name, kind) in _PLACES.items()}

_ALLOWED: Final = (
    b"default-src 'none'",
    b"script-src 'self'",
    b"style-src 'self'",
    b"connect-src 'self'",
    b"img-src data:",
    b"base-uri 'none'",
    b"form-action 'none'",
    b"frame-ancestors 'none'",
)
_HEADERS: Final = [
    (b"content-security-policy", b"; ".join(_ALLOWED)),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class LivePage:
    """In front of the admin API, which answers everything else."""

    def __init__(self, control: Handler, state: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
        """`state` makes the document."""
        self._control = control
        self._state = state

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        if exchange.path != STATE and exchange.path not in _FILES:
            await self._control(exchange)
        elif exchange.method not in ("GET", "HEAD"):
            exchange.error(405, f"{exchange.method} is not allowed here; use GET, HEAD", headers=[(b"allow", b"GET, HEAD")])
        elif exchange.path == STATE:
            exchange.respond(200, msgspec.json.encode(await in_task(self._state())), headers=_HEADERS)
        else:
            body, kind = _FILES[exchange.path]
            exchange.respond(200, body, kind, _HEADERS)
