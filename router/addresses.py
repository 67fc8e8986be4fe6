"""Where may an engine that is named at run time not be? At addresses that are never an engine's and often somebody's credentials.

A cloud's metadata service answers anyone on its machine with that machine's credentials. Whoever may add engines should not thereby be
able to have the router read them. Private and loopback addresses are where engines usually are, and are fine.
"""

from __future__ import annotations

import ipaddress
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure's wire server
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::254",  # AWS by IPv6
            "fd20:ce::254",  # Google Cloud by IPv6
        ),
    )
)
"""Metadata services that are not at a link-local address, as most are."""
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


def refusal(address: str) -> str | None:
    """Why no engine can be at this IP address, in words; None when one can. Raises ValueError when it is no address.

    >>> refusal("169.254.169.254"), refusal("10.0.0.7")
    ('a link-local address', None)
    """
    for ip in _meanings(ipaddress.ip_address(address.partition("%")[0])):
        if ip.is_link_local:
            return "a link-local address"
        if ip in METADATA:
            return "a metadata service's address"
        if ip.is_unspecified:
            return "no address to connect to"
        if ip.is_multicast or (ip.version == 4 and ip == ipaddress.ip_address("255.255.255.255")):
            return "not one host's address"
    return None


def _meanings(ip: Address) -> tuple[Address, ...]:
    """The address, and the IPv4 address that an IPv6 one leads to."""
    if isinstance(ip, ipaddress.IPv4Address):
        return (ip,)
    inside = ip.ipv4_mapped or ip.sixtofour
    if inside is None and (ip in _NAT64 or int(ip) >> 32 == 0):
        inside = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return (ip,) if inside is None or int(ip) == 1 else (ip, inside)
