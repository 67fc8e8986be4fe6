"""What stands between the network and us? Keys, the admin token and the certificate, as the settings name them, kept up to date.

api_key, api_keys_file ──▶ door          who may ask models anything
admin_token(_file)     ──▶ admin_door    who may see and change the fleet; no token, no admin API
tls_cert, tls_key      ──▶ certificate   both listeners'
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import msgspec

from discovery.config import ConfigError
from router.files import Files, read_text
from router.keys import ADMIN_WANTED, CLIENTS_WANTED, OPEN_PATHS, ApiKey, BadKeys, Door, KeyRing, read_keys, read_token
from router.tls import Certificate, server_context
from router.ui.page import PAGE_PATHS

if TYPE_CHECKING:
    from router.settings import ServeSettings


T = TypeVar("T")


class GuardsUnusable(ConfigError):
    """A file that guards the router cannot be used, and there is nothing earlier to fall back to."""


class Guards(msgspec.Struct, frozen=True):
    """All of it."""

    door: Door | None
    """None: clients need no key."""
    admin_door: Door | None
    """None: there is no admin API."""
    certificate: Certificate
    files: Files


async def read_guards(settings: ServeSettings) -> Guards:
    """Read everything once; `files` then follows it. Raises GuardsUnusable."""
    files, clients, admins, certificate = Files(), KeyRing(()), KeyRing(()), Certificate()
    with _named("api_keys_file"):
        await _read_keys(settings, files, clients)
    with _named("admin_token_file"):
        await _read_token(settings, files, admins)
    if settings.tls_cert is not None:
        cert, key = settings.tls_cert, settings.tls_key
        with _named("tls_cert, tls_key"):
            await files.follow((cert,) if key is None else (cert, key), lambda: server_context(cert, key), certificate.replace)
    return Guards(
        door=Door(clients, CLIENTS_WANTED, OPEN_PATHS) if settings.asks_for_keys else None,
        admin_door=Door(admins, ADMIN_WANTED, PAGE_PATHS) if settings.has_admin else None,
        certificate=certificate,
        files=files,
    )


@contextlib.contextmanager
def _named(settings: str) -> Iterator[None]:
    """What cannot be read or used is said with the setting that it comes from."""
    try:
        yield
    except OSError as error:
        raise GuardsUnusable(f"{settings}: {error.filename or 'the file'}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise GuardsUnusable(f"{settings}: {error}") from error


async def _read_keys(settings: ServeSettings, files: Files, ring: KeyRing) -> None:
    given = read_keys(settings.api_key, "item")
    ring.replace(given)
    path = settings.api_keys_file
    if path is not None:
        await files.follow(
            (path,), lambda: _in_file(path, lambda text: read_keys(text.splitlines())), lambda keys: ring.replace(given + keys)
        )


async def _read_token(settings: ServeSettings, files: Files, ring: KeyRing) -> None:
    if settings.admin_token is not None:
        ring.replace([ApiKey("admin", settings.admin_token)])
    path = settings.admin_token_file
    if path is not None:
        await files.follow((path,), lambda: _in_file(path, lambda text: [ApiKey("admin", read_token(text))]), ring.replace)


def _in_file(path: str, read: Callable[[str], T]) -> T:
    """What a file's text says; complaints name the file."""
    try:
        return read(read_text(path))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None
