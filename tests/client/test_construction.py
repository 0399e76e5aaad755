"""What a client may be made of."""

from __future__ import annotations

import httpx
import pytest
from client.fakes import FakeServer, run

from rollout._http import is_loopback
from rollout.client import RolloutClient
from rollout.errors import InvalidFieldError


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://rollouts.example//", "https://rollouts.example"),
        ("https://rollouts.example/team/a/", "https://rollouts.example/team/a"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("HTTP://LOCALHOST", "HTTP://LOCALHOST"),
        ("http://user:pass@h:81/a/", "http://h:81/a"),
    ],
)
def test_urls(url, kept):
    assert RolloutClient(url=url).url == kept


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "localhost:8000",
        "rollouts.example",
        "ftp://h",
        "unix:/socket",
        "http://",
        "http:///path",
        "http://:8000",
        "http://h:port",
        "http://h:99999",
        "http://[::1",
        "http://h?",
        "http://h?a=b",
        "http://h#",
        "http://h/#part",
        " http://h",
        "http://h\n",
        "http://h h",
        "http://h\x00",
        b"http://h",
        None,
        8000,
    ],
)
def test_urls_that_cannot_be_used(url):
    with pytest.raises(ValueError, match=r"^url "):
        RolloutClient(url=url)


def test_an_url_that_cannot_be_read_is_not_quoted():
    with pytest.raises(ValueError) as caught:
        RolloutClient(url="http://user:s3cret/pass@h:80")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "key", ["", " ", "\t\n", "key\n", " key", "a\nb", "a\x00b", "schlüssel", 7, b"k"]
)
def test_api_keys_that_cannot_be_used(key):
    with pytest.raises(ValueError, match=r"^api_key ") as caught:
        RolloutClient(url="http://h", api_key=key)
    assert "schl" not in str(caught.value)


@pytest.mark.parametrize(
    "timeout", [float("nan"), float("inf"), float("-inf"), True, "60", 10**400]
)
def test_admission_timeouts_that_cannot_be_used(timeout):
    with pytest.raises(ValueError, match=r"^admission_timeout_sec "):
        RolloutClient(url="http://h", admission_timeout_sec=timeout)


@pytest.mark.parametrize("timeout", [None, 0, 60, 0.5])
def test_admission_timeouts(timeout):
    assert (
        RolloutClient(url="http://h", admission_timeout_sec=timeout).admission_timeout_sec
        == timeout
    )


def test_arguments_are_keywords_only():
    with pytest.raises(TypeError):
        RolloutClient("http://h")


def test_the_repr_hides_secrets():
    client = RolloutClient(url="http://user:s3cret@h:81/a")
    assert repr(client) == "<RolloutClient http://h:81/a open>"
    keyed = RolloutClient(url="http://h", api_key="s3cret-key")
    for item in (client, keyed):
        assert "s3cret" not in repr(item) + repr(item._wire)


async def test_credentials_in_the_url_are_sent_as_basic_authentication():
    server = FakeServer()
    http = httpx.AsyncClient(transport=server)
    await run(RolloutClient(url="http://user:p%40ss@h", http_client=http))
    assert {call.headers["Authorization"] for call in server.calls} == {"Basic dXNlcjpwQHNz"}


async def test_credentials_in_the_url_show_up_in_no_log(caplog):
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", logger="httpx")
    http = httpx.AsyncClient(transport=FakeServer())
    await run(RolloutClient(url="http://user:s3cret@h", http_client=http))
    assert "http://h/rollout" in caplog.text  # httpx logs every request
    assert "s3cret" not in caplog.text


def test_credentials_in_the_url_and_an_api_key_cannot_both_be_sent():
    with pytest.raises(ValueError, match="leave one out") as caught:
        RolloutClient(url="http://user:s3cret@h", api_key="s3cret-key")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://localhost:1", True),
        ("http://LOCALHOST", True),
        ("http://localhost.", True),
        ("http://api.localhost", True),
        ("http://127.0.0.1", True),
        ("http://127.9.9.9:80", True),
        ("http://[::1]:80", True),
        ("http://0.0.0.0:8000", True),
        ("http://[::]:8000", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://notlocalhost", False),
        ("https://rollouts.example", False),
    ],
)
def test_loopback_addresses(url, loopback):
    assert is_loopback(url) is loopback


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSLKEYLOGFILE"])
def test_plain_http_asks_for_no_file(monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, str(tmp_path / "missing" / "file"))
    for proxy in ("", "http://127.0.0.1:9"):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        RolloutClient(url="http://10.0.0.1:9")


def test_a_key_log_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "missing" / "log"))
    with pytest.raises(InvalidFieldError, match=r"^SSLKEYLOGFILE names a file that "):
        RolloutClient(url="https://127.0.0.1:9")


def test_certificates_that_cannot_be_read_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    says = "^SSL_CERT_FILE names certificates that cannot be read"
    with pytest.raises(InvalidFieldError, match=says):
        RolloutClient(url="https://127.0.0.1:9")
