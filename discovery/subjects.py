"""What is each stream called on the bus?

A NATS subject is dot-separated tokens, and an engine's URL has dots of its own; so the URL travels as one token, with every
byte that is not a letter, a digit or `-` written `=XX`. That can be read by eye and turned back exactly:

    Endpoint("http://10.0.0.7:8000", 1)   ⇄   commutator.kv.http=3A=2F=2F10=2E0=2E0=2E7=3A8000.1
"""

from __future__ import annotations

import re

from engines.types import Endpoint

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TOKEN = re.compile(r"(?:[A-Za-z0-9-]|=[0-9A-F]{2})+")
_UNSAFE = re.compile(rb"[^A-Za-z0-9-]")
_ESCAPED = re.compile(rb"=([0-9A-F]{2})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def to_token(text: str) -> str:
    """`text` as one subject token; `from_token` gives it back."""
    return _UNSAFE.sub(lambda found: b"=%02X" % found[0][0], text.encode()).decode("ascii")


def from_token(token: str) -> str | None:
    """The text that `to_token` made this token of, or None when no text gives it."""
    if _TOKEN.fullmatch(token) is None:
        return None
    raw = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), token.encode("ascii"))
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if to_token(text) == token else None


class Subjects:
    """The names of one namespace: fleets that share a NATS server take different ones."""

    def __init__(self, namespace: str) -> None:
        """Raises ValueError for a namespace that NATS would read as a wildcard or refuse."""
        if _NAMESPACE.fullmatch(namespace) is None:
            raise ValueError(f"namespace {namespace!r} is not letters, digits, '_' and '-' in tokens separated by dots")
        self.namespace = namespace
        self.streams = f"{namespace}.kv.*.*"
        """Every stream of batches and beacons."""
        self.routers = f"{namespace}.routers"
        """Where routers tell each other that they are there, and what they carry."""
        self.engines = f"{namespace}.engines"
        """Where engines are announced."""
        self.observations = f"{namespace}.observations"
        """Where routers tell planners what clients ask for and see."""
        self.plans = f"{namespace}.plans"
        """Where planners tell how many engines there are to be."""
        self.acknowledgements = f"{namespace}.plans.done"
        """Where whoever carries plans out says that one is."""

    def stream(self, endpoint: Endpoint) -> str:
        """Where the batches and beacons of one endpoint are published."""
        return f"{self.namespace}.kv.{to_token(endpoint.engine)}.{endpoint.rank}"

    def snapshot(self, endpoint: Endpoint) -> str:
        """Where the relay that owns this endpoint's stream is asked for a snapshot."""
        return f"{self.namespace}.snapshot.{to_token(endpoint.engine)}.{endpoint.rank}"

    def reply(self, mirror: str, endpoint: Endpoint, attempt: int) -> str:
        """Where `mirror` wants the chunks of its `attempt`-th snapshot of this endpoint."""
        return f"{self.namespace}.reply.{mirror}.{to_token(endpoint.engine)}.{endpoint.rank}.{attempt}"

    def replies(self, mirror: str) -> str:
        """Every snapshot that `mirror` asked for."""
        return f"{self.namespace}.reply.{mirror}.*.*.*"

    def endpoint(self, subject: str) -> Endpoint | None:
        """Whose stream this subject is, or None when it is none of ours."""
        head, _, rest = subject.rpartition(".kv.")
        return _endpoint(*rest.split(".")) if head == self.namespace and rest.count(".") == 1 else None

    def answered(self, subject: str) -> tuple[Endpoint, int] | None:
        """Which endpoint and attempt a snapshot's subject is for, or None when it is none of ours."""
        head, *rest = subject.rsplit(".", 3)
        if len(rest) != 3 or not head.startswith(f"{self.namespace}.reply."):
            return None
        token, rank, attempt = rest
        endpoint = _endpoint(token, rank)
        return (endpoint, int(attempt)) if endpoint is not None and _NUMBER.fullmatch(attempt) else None


def _endpoint(token: str, rank: str) -> Endpoint | None:
    engine = from_token(token)
    return Endpoint(engine, int(rank)) if engine and _NUMBER.fullmatch(rank) else None
