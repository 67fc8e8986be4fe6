"""Where no engine can be, however the address is written."""

from __future__ import annotations

import pytest

from router.addresses import METADATA, refusal


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.7", "192.168.1.2", "172.16.0.1", "8.8.8.8", "::1", "fd00::7", "2001:db8::1", "::ffff:10.0.0.7"]
)
def test_an_engine_can_be_at_any_ordinary_address(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.0.1",
        "fe80::1",
        "fe80::1%eth0",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "::a9fe:a9fe",
    ],
)
def test_A3_none_can_be_at_a_link_local_one_in_any_disguise(address: str) -> None:
    assert refusal(address) == "a link-local address"


@pytest.mark.parametrize("address", sorted(map(str, METADATA)))
def test_none_can_be_where_a_cloud_gives_out_credentials(address: str) -> None:
    assert refusal(address) == "a metadata service's address"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:0.0.0.0"])
def test_none_can_be_at_what_is_no_hosts_address(address: str) -> None:
    assert refusal(address) is not None


def test_a_name_is_no_address() -> None:
    with pytest.raises(ValueError, match="metadata"):
        refusal("metadata.google.internal")
