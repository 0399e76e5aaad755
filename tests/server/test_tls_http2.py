"""TLS clients that would like HTTP/2 get HTTP/1.1, and cannot hold the server up."""

from __future__ import annotations

import ssl

import pytest
import trio
import trustme
from support import connected, make_app, receive_until_closed, served


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def files(tmp_path, authority):
    """The options that turn TLS on."""
    certificate = authority.issue_cert("127.0.0.1")
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(certfile)
    certificate.private_key_pem.write_to_path(keyfile)
    return {"certfile": certfile, "keyfile": keyfile}


async def test_a_handshake_that_does_not_begin_is_given_up(files, monkeypatch):
    monkeypatch.setattr("rollout.server.connections.HEAD_SEC", 0.02)
    async with served(make_app(), **files) as url, connected(url) as stream:
        with trio.fail_after(30):
            assert await receive_until_closed(stream) == b""


async def test_only_http_1_is_negotiated(files, authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with served(make_app(), **files) as url:
        port = int(url.rpartition(":")[2])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        tls = trio.SSLStream(stream, context, server_hostname="127.0.0.1")
        await tls.do_handshake()
        assert tls.selected_alpn_protocol() == "http/1.1"
        await trio.aclose_forcefully(tls)
