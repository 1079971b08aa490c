"""What an endpoint's name means, as far as the name alone tells."""

import pytest

from elastic.addresses import means_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LocalHost.", True),
        ("node0.localhost", True),
        ("localhost.localdomain", True),
        ("127.0.0.1", True),
        ("127.1", True),
        ("::1", True),
        ("localhost.example.com", False),
        ("mylocalhost", False),
        ("10.0.0.1", False),
    ],
)
def test_which_hosts_are_loopback_everywhere(host: str, loopback: bool) -> None:
    assert means_loopback(host) is loopback
