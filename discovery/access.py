"""How are we let in to a NATS server, and how do we know that it is the right one? What settings name, read and put to use.

    user + password │ token │ nkey seed │ creds (JWT and seed)        one of them, or none
    ca, cert, key                                                     TLS: whom we trust, and who we are

Files are read again for each connection, so that credentials which are exchanged while we run are taken up. Nothing secret is shown
before TLS stands, where TLS is wanted: a server that offers none is not told who we are.
"""

from __future__ import annotations

import base64
import importlib
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta

from discovery.config import Complaint, ConfigError

MAX_BYTES: Final = 1 << 20
SCHEMES: Final = ("nats://", "tls://", "ws://", "wss://")

_Text = Annotated[str, Meta(min_length=1)]
NatsUrl = Annotated[
    str | None,
    Meta(
        description="NATS server to use, `nats://host:4222`; several of a cluster, separated by commas. A router starts a private one when "
        "this is not given. Credentials may stand in it, "
        "`nats://user:password@host` or `nats://token@host`, but are better kept off the command line, in the environment or in files."
    ),
]
NatsUser = Annotated[_Text | None, Meta(description="User at the NATS server; `nats_password` belongs to it.")]
NatsPassword = Annotated[_Text | None, Meta(description="The user's password; better in the environment.", extra={"secret": True})]
NatsToken = Annotated[_Text | None, Meta(description="Token of the NATS server; better in the environment.", extra={"secret": True})]
NatsCreds = Annotated[_Text | None, Meta(description="A `.creds` file, with the user's JWT and seed; read again at every connection.")]
NatsNkey = Annotated[_Text | None, Meta(description="File of the user's nkey seed (`SU…`); read again at every connection.")]
NatsCa = Annotated[
    _Text | None, Meta(description="PEM file of the authority that signs the server's certificate; asks for TLS, as `tls://` does.")
]
NatsCert = Annotated[_Text | None, Meta(description="PEM file of our certificate, where the server wants one of its clients.")]
NatsKey = Annotated[_Text | None, Meta(description="PEM file of its key, where that is not in `nats_cert` too.")]


class AccessUnusable(ConfigError):
    """A file that lets us in cannot be used; the message names the setting."""


class NatsSettings(Protocol):
    """A command's settings, as far as they are about NATS."""

    @property
    def nats(self) -> str | None: ...  # noqa: D102  described above, once for all commands
    @property
    def nats_user(self) -> str | None: ...  # noqa: D102
    @property
    def nats_password(self) -> str | None: ...  # noqa: D102
    @property
    def nats_token(self) -> str | None: ...  # noqa: D102
    @property
    def nats_creds(self) -> str | None: ...  # noqa: D102
    @property
    def nats_nkey(self) -> str | None: ...  # noqa: D102
    @property
    def nats_ca(self) -> str | None: ...  # noqa: D102
    @property
    def nats_cert(self) -> str | None: ...  # noqa: D102
    @property
    def nats_key(self) -> str | None: ...  # noqa: D102


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to be let in with; paths, but for the first three."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    creds: str | None = None
    nkey: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    tls: bool = False
    """Whether to refuse a server without TLS, as `tls://` says; a CA or a certificate says so too."""

    @property
    def wants_tls(self) -> bool:
        """Whether a server without TLS is refused."""
        return self.tls or self.ca is not None or self.cert is not None

    @property
    def shows(self) -> str:
        """What is shown to the server, by the names of settings; empty: nothing."""
        named = {"nats_creds": self.creds, "nats_nkey": self.nkey, "nats_user and nats_password": self.user, "nats_token": self.token}
        return next((name for name, value in named.items() if value is not None), "")


class Pass(msgspec.Struct, frozen=True):
    """What was read of it, for one connection."""

    tls: ssl.SSLContext | None
    jwt: str | None = None
    seed: str | None = None


def access_of(settings: NatsSettings) -> Access:
    """What the settings say."""
    return Access(
        user=settings.nats_user,
        password=settings.nats_password,
        token=settings.nats_token,
        creds=settings.nats_creds,
        nkey=settings.nats_nkey,
        ca=settings.nats_ca,
        cert=settings.nats_cert,
        key=settings.nats_key,
    )


def complaints(settings: NatsSettings, given: frozenset[str]) -> Iterator[Complaint]:
    """What is wrong in combination; `given` holds the keys that somebody set."""
    if settings.nats is None:
        for key in sorted(key for key in given if key.startswith("nats_")):
            yield Complaint(key, "has no effect without nats: the private server lets nobody else in")
        return
    servers = _list(settings.nats)
    if not servers or not all(server.startswith(SCHEMES) for server in servers):
        yield Complaint("nats", f"{settings.nats!r} must begin with nats://, tls://, ws:// or wss://")
    if (settings.nats_user is None) != (settings.nats_password is None):
        yield Complaint("nats_user", "nats_user and nats_password belong together")
    ways = [name for name in ("nats_user", "nats_token", "nats_creds", "nats_nkey") if getattr(settings, name) is not None]
    if any("@" in server for server in servers):
        ways.insert(0, "the credentials in nats")
    if len(ways) > 1:
        yield Complaint("nats", f"there is one way to be let in; given are {' and '.join(ways)}")
    if settings.nats_key is not None and settings.nats_cert is None:
        yield Complaint("nats_key", "has no effect without nats_cert")


def split(urls: str | Sequence[str], access: Access) -> tuple[list[str], Access]:
    """The servers without credentials in their URLs, and access with those in it; where URLs hold different ones, they stay in them.

    >>> split("nats://me:p%40ss@a:4222,nats://b:4222", Access())[0]
    ['nats://a:4222', 'nats://b:4222']
    """
    servers = _list(urls) if isinstance(urls, str) else list(urls)
    if any(server.startswith(("tls://", "wss://")) for server in servers):
        access = msgspec.structs.replace(access, tls=True)
    parts = {server: urlsplit(server) for server in servers}
    told = {part.netloc.rpartition("@")[0] for part in parts.values()} - {""}
    if len(told) != 1:
        return servers, access
    user, colon, password = told.pop().partition(":")
    access = msgspec.structs.replace(
        access, **({"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)})
    )
    return [part._replace(netloc=part.netloc.rpartition("@")[2]).geturl() for part in parts.values()], access


def read(access: Access) -> Pass:
    """Read what there is to read. Raises AccessUnusable. Blocks."""
    return Pass(_context(access), *_jwt_and_seed(access))


def shown(access: Access, given: Pass, check: Callable[[], None]) -> dict[str, Any]:
    """What the client is told to say. `check` is called first, and may raise."""

    def checked(value: str) -> Callable[[], str]:
        def give() -> str:
            check()
            return value

        return give

    if given.jwt is not None and given.seed is not None:
        return {"user_jwt_cb": lambda jwt=given.jwt: jwt.encode(), "signature_cb": _signing(given.seed, check)}
    if given.seed is not None:
        return {"nkeys_seed_str": given.seed}
    if access.user is not None:
        return {"user": checked(access.user), "password": checked(access.password or "")}
    return {} if access.token is None else {"token": checked(access.token)}


def _signing(seed: str, check: Callable[[], None]) -> Callable[[str], bytes]:
    """How the server's nonce is signed."""

    def sign(nonce: str) -> bytes:
        check()
        return base64.b64encode(importlib.import_module("nkeys").from_seed(bytearray(seed.encode())).sign(nonce.encode()))

    return sign


def _list(servers: str) -> list[str]:
    return servers.replace(",", " ").split()


def _context(access: Access) -> ssl.SSLContext | None:
    if not access.wants_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=access.ca)
    except (OSError, ValueError) as error:
        raise AccessUnusable(f"nats_ca: {access.ca}: {_why(error, 'it holds no certificate')}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if access.cert is not None:
        try:
            context.load_cert_chain(access.cert, access.key, password=_no_password)
        except (OSError, ValueError) as error:
            names, files = ("nats_cert", access.cert) if access.key is None else ("nats_cert, nats_key", f"{access.cert}, {access.key}")
            raise AccessUnusable(f"{names}: {files}: {_why(error, 'no certificate and its key')}") from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def _jwt_and_seed(access: Access) -> tuple[str | None, str | None]:
    if access.creds is not None:
        parts = _sections(_text("nats_creds", access.creds))
        jwt, seed = parts.get("NATS USER JWT"), parts.get("USER NKEY SEED")
        if jwt is None or seed is None:
            raise AccessUnusable(f"nats_creds: {access.creds}: it does not hold a user's JWT and seed, as `nsc` and `nats` write them")
        return jwt, _checked("nats_creds", access.creds, seed)
    if access.nkey is not None:
        lines = [line.strip() for line in _text("nats_nkey", access.nkey).splitlines()]
        seed = next((line for line in lines if line.startswith("SU")), "")
        return None, _checked("nats_nkey", access.nkey, seed)
    return None, None


def _sections(text: str) -> dict[str, str]:
    """What stands between `-----BEGIN X-----` and `------END X------`, by X."""
    found: dict[str, str] = {}
    name, body = "", list[str]()
    for line in map(str.strip, text.splitlines()):
        marker = line.strip("-") if line.startswith("---") else ""
        if marker.startswith("BEGIN "):
            name, body = marker.removeprefix("BEGIN "), []
        elif marker.startswith("END ") and name:
            found[name] = "".join(body)
            name = ""
        elif name:
            body.append(line)
    return found


def _checked(setting: str, path: str, seed: str) -> str:
    """The seed, which can be signed with."""
    try:
        nkeys = importlib.import_module("nkeys")
    except ImportError:
        raise AccessUnusable(f"{setting}: signing with an nkey needs the package `nkeys`: pip install 'commutator[nkeys]'") from None
    try:
        nkeys.from_seed(bytearray(seed.encode())).public_key  # noqa: B018  it is made when it is asked for
    except Exception:  # noqa: BLE001  whatever it is, its text may hold the seed
        raise AccessUnusable(f"{setting}: {path}: it holds no user's seed (a line that begins with SU)") from None
    return seed


def _text(setting: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessUnusable(f"{setting}: {path}: {_why(error, 'it is not text')}") from None


def _why(error: Exception, otherwise: str) -> str:
    """Never anything of what is in a file."""
    if isinstance(error, ssl.SSLError):
        return f"{otherwise} ({error.reason or 'unreadable'})"
    if isinstance(error, OSError):
        return (error.strerror or "it cannot be read").lower()
    return otherwise if isinstance(error, UnicodeDecodeError) else str(error)
