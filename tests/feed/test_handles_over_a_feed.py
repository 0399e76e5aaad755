"""The tests of the handle, all over again, with a feed in place of the polls."""

from __future__ import annotations

import pytest
from client import test_handle, test_statuses
from client.test_handle import *  # noqa: F403 - each of its tests
from client.test_statuses import *  # noqa: F403
from feed.face import client_over_feed

# About the request of a poll; the feed's own is in `feed.test_client_feed`.
del test_a_transport_error_keeps_its_type_request_and_cause  # noqa: F821


@pytest.fixture(autouse=True)
def over_a_feed(monkeypatch):
    for module in (test_handle, test_statuses):
        monkeypatch.setattr(module, "client_of", client_over_feed)
