"""Which addresses only this machine reaches."""

from __future__ import annotations

import pytest

from contract.settings.addresses import is_loopback


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:2", "localhost:3"])
def test_addresses_of_this_machine(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["localhost.example:1", "[::]:1", "0.0.0.0:1", "10.0.0.1:1", "head:50052", "", "1"])
def test_other_addresses(address: str) -> None:
    assert not is_loopback(address)
