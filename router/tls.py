"""How do clients know that it is us, and that nobody reads along? TLS on the listener, with a certificate that may change while it listens."""

from __future__ import annotations

import ssl


class Certificate:
    """The certificate in force. Connections that are open keep the one they began with."""

    def __init__(self) -> None:
        self._listener: ssl.SSLContext | None = None
        self._current: ssl.SSLContext | None = None

    @property
    def listener(self) -> ssl.SSLContext | None:
        """What a listener is given; None without a certificate."""
        return self._listener

    def replace(self, context: ssl.SSLContext) -> None:
        """New connections get this one.

        A listener keeps its context for life, and one whose certificate is exchanged in place is unusable when its key does not come too.
        So every context stays as it was made, and each handshake is turned over to the current one.
        """
        self._current = context
        if self._listener is None:
            self._listener = context
            context.sni_callback = self._turn_over

    def _turn_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG002  ssl's signature
        if self._current is not None:
            connection.context = self._current


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """A context for a listener, from a PEM file with the certificate and its chain, and one with the key (None: it is in the same file).

    Raises OSError or ValueError. Blocks.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        files = f"{certificate} does" if key is None else f"{certificate} and {key} do"
        raise ValueError(f"{files} not hold a certificate and its key ({error.reason or error})") from None
    return context


def _no_password() -> str:
    """Asked for when the key is encrypted; without an answer, OpenSSL would ask the terminal."""
    raise ValueError("the TLS key is encrypted; a router that starts by itself cannot ask for its password")
