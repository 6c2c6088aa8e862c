"""The connection of a command to Ray."""

import pytest

from nanovllm.cluster.ray_connection import connected
from nanovllm.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "10..0.1:6379", "x" * 70 + ":6379", "127.0.0.1:99999"])
def test_address_that_nobody_answers_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"), connected(address, object_store_bytes=2**27):
        pass
