"""TLS clients that would like HTTP/2 get HTTP/1.1, and cannot hold the server up."""

from __future__ import annotations

import ssl

import trio
import trustme
from support import make_app, served


async def test_only_http_1_is_negotiated(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(certfile)
    certificate.private_key_pem.write_to_path(keyfile)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with served(make_app(), certfile=certfile, keyfile=keyfile) as url:
        port = int(url.rpartition(":")[2])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        tls = trio.SSLStream(stream, context, server_hostname="127.0.0.1")
        await tls.do_handshake()
        assert tls.selected_alpn_protocol() == "http/1.1"
        await trio.aclose_forcefully(tls)
