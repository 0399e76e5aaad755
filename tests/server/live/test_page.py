"""Where the page of a server is served, and to whom."""

from __future__ import annotations

import pytest
from server.faults import API_KEY, assert_refused, in_process_http
from support import make_app

from rollout.errors import InvalidFieldError


@pytest.mark.parametrize(
    ("url", "served"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("https://127.0.0.1:8000", True),
        ("http://0.0.0.0:8000", False),
        ("http://[::]:8000", False),
        ("http://10.0.0.7:8000", False),
        ("http://unix:/run/rollout.sock", False),
    ],
)
@pytest.mark.parametrize("ui", [None, True, False])
def test_by_default_it_is_served_on_the_loopback(url, served, ui):
    app = make_app(ui=ui)
    app.bound(url)
    assert app.ui is (served if ui is None else ui)


async def test_it_needs_no_key_and_everything_else_does():
    async with in_process_http(make_app(ui=True, api_key=API_KEY)) as http:
        page = await http.get("/ui")
        assert page.headers["content-type"].startswith("text/html")
        assert API_KEY not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe-inline" not in page.headers["content-security-policy"]
        assert_refused(await http.post("/ui"), 401)
        assert_refused(await http.get("/ui/"), 401)
        assert_refused(await http.get("/rollouts/live"), 401)
        assert_refused(await http.get("/rollout/r/live"), 401)


async def test_without_it_the_answer_says_how_to_get_it():
    async with in_process_http(make_app(ui=False)) as http:
        assert "--ui" in assert_refused(await http.get("/ui"), 404)
    with pytest.raises(InvalidFieldError, match="ui"):
        make_app(ui="yes")


async def test_a_worker_serves_none():
    app = make_app(ui=True)
    app.become_worker("the key of the front")
    assert app.ui is False
