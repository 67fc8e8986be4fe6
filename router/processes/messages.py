"""What do the parent and its workers say to each other? Shapes only; `channel` carries them.

parent ──▶ worker   Orders, once · GetPage · GetReadiness · GetPart · AdminCall · PeerGone
worker ──▶ parent   Up or Failed, once · GetPage · GetReadiness: of all workers together
"""

from __future__ import annotations

import msgspec

Sample = tuple[str, tuple[tuple[str, str], ...], float]
"""A series' name, its labels, and its value."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric family as one process has it."""

    name: str
    text: str
    kind: str
    """As Prometheus calls it: counter, gauge or histogram."""
    samples: list[Sample]


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A process's metrics."""

    families: list[Family]


class Readiness(msgspec.Struct, frozen=True):
    """Whether new requests are taken, for which models, by how many engines each."""

    accepting: bool
    models: dict[str, int]
    joining: list[str]
    """Engines that are not ready yet."""


class AdminCall(msgspec.Struct, frozen=True, array_like=True, tag="admin"):
    """A request to the admin API."""

    method: str
    path: bytes
    query: bytes = b""
    body: bytes = b""


class AdminReply(msgspec.Struct, frozen=True, array_like=True):
    """What came of it."""

    status: int
    body: bytes = b"null"
    """JSON."""
    error: str = ""
    """In place of a body."""
    allow: str = ""
    """Methods, for a 405."""


class Orders(msgspec.Struct, frozen=True, array_like=True, tag="orders"):
    """What a worker is to be."""

    settings: bytes
    """`ServeSettings`, in msgpack: with secrets, so never in arguments or variables."""
    index: int
    processes: int
    router: str
    """Its name on the bus."""
    nats: str
    port: int
    rejoins: bool
    """Others serve already: it is to know the engines before it listens."""
    calls: list[AdminCall]
    """What operators have changed since the parent began."""


class GetPage(msgspec.Struct, frozen=True, array_like=True, tag="page"):
    """Asks for metrics."""


class GetReadiness(msgspec.Struct, frozen=True, array_like=True, tag="readiness"):
    """Asks for readiness."""


class GetPart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Asks for what the process shows on the live page: a `router.ui.parts.Part`."""


class PeerGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """A worker has ended; nobody need wait for its silence."""

    router: str


class Up(msgspec.Struct, frozen=True, array_like=True, tag="up"):
    """The worker listens."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot do what it was told."""

    reason: str
    usage: bool
    """The configuration is what is wrong."""


Request = Orders | GetPage | GetReadiness | GetPart | AdminCall | PeerGone | Up | Failed


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A request, on its way; number 0 wants no answer."""

    number: int
    request: Request


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What came of the request of that number: the answer in msgpack."""

    number: int
    result: bytes


Frame = Ask | Answer
