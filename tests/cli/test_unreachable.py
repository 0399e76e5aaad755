"""What the commands say of a server that cannot be reached."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import trustme
from cli.harness import serving

from rollout.cli.failures import why_unreachable


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def certificates(authority, tmp_path_factory):
    """A folder with ``ca.pem``, and ``cert.pem`` and ``key.pem`` for localhost."""
    folder = tmp_path_factory.mktemp("certificates")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    return folder


@pytest.fixture(scope="module")
def tls_server(certificates, apps):
    """The port of a server with TLS."""
    options = ("--certfile", str(certificates / "cert.pem"), "--keyfile")
    with serving(
        apps, "cli_apps:app", "--bind", "127.0.0.1:0", *options, str(certificates / "key.pem")
    ) as (_, url):
        yield url.rpartition(":")[2]


@pytest.fixture
def answering():
    """Make a server that answers everything with one status; returns its URL."""
    servers = []

    def start(status):
        class Always(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                return

        server = HTTPServer(("127.0.0.1", 0), Always)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nobody_listens(cli):
    line = cli.fails(2, "health", "http://127.0.0.1:9")
    assert "(ConnectError: Connection refused)" in line
    assert line.endswith("is a rollout server running there?")


def test_a_certificate_of_an_unknown_authority(cli, tls_server):
    line = cli.fails(2, "health", f"https://localhost:{tls_server}")
    assert "its certificate is refused" in line
    assert "SSL_CERT_FILE" in line


def test_the_authority_that_the_environment_names(cli, tls_server, certificates):
    url = f"https://localhost:{tls_server}"
    assert cli("health", url, SSL_CERT_FILE=str(certificates / "ca.pem")).exit_code == 0


def test_a_certificate_for_another_name(cli, tls_server, certificates):
    url = f"https://127.0.0.1:{tls_server}"
    line = cli.fails(2, "health", url, SSL_CERT_FILE=str(certificates / "ca.pem"))
    assert "use the name that its certificate was made for" in line


def test_no_tls_where_it_is_needed(cli, tls_server):
    assert "say https://" in cli.fails(2, "health", f"http://localhost:{tls_server}")


def test_tls_where_there_is_none(cli, server):
    line = cli.fails(2, "health", server.replace("http://", "https://"))
    assert "it does not speak TLS; say http://" in line


@pytest.mark.parametrize("kind", ["missing", "no certificates"])
def test_certificates_that_cannot_be_read(cli, tmp_path, kind):
    file = tmp_path / "authorities.pem"
    if kind != "missing":
        file.write_text("nothing of the kind")
    line = cli.fails(2, "health", "https://localhost:9", SSL_CERT_FILE=str(file))
    assert "SSL_CERT_FILE names certificates that cannot be read: " in line


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (302, "redirects are not followed; give the URL that this one leads to"),
        (405, "is this the base URL of a rollout server?"),
        (500, "the server's log says more"),
        (501, "is this the base URL of a rollout server?"),
        (502, "the gateway in front of the server does not reach it"),
        (504, "the gateway in front of the server waits for less long than a poll takes"),
    ],
)
def test_a_status_that_is_no_answer_comes_with_advice(cli, answering, status, advice):
    line = cli.fails(2, "health", answering(status))
    assert f"answered {status}" in line
    assert line.endswith(f"; {advice}")


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("somebody:secret@host:80", "http://host:80"),
    ],
)
def test_an_address_alone_is_told_as_a_url(cli, url, instead):
    line = cli.fails(2, "health", url)
    assert line.endswith(f"as in {instead}")
    assert "secret" not in line


class Failed(Exception):
    pass


def caused_by(*causes):
    """An error with a chain of causes, outermost first."""
    error = outer = Failed()
    for cause in causes:
        error.__cause__ = cause
        error = cause
    return outer


def test_the_reason_is_the_one_nearest_to_the_system():
    refused = ConnectionRefusedError(111, "Connection refused")
    group = ExceptionGroup("all attempts failed", [refused, OSError(101, "unreachable")])
    reason, _ = why_unreachable(caused_by(OSError("all attempts failed"), group))
    assert reason == "Failed: Connection refused"


def test_a_repr_is_no_reason():
    reason, _ = why_unreachable(caused_by(Failed("BrokenResourceError()")))
    assert reason == "Failed"


def test_a_server_that_wants_a_certificate_of_the_client():
    alert = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    reason, advice = why_unreachable(caused_by(alert))
    assert reason == "TLS: tlsv13 alert certificate required"
    assert "client certificate" in advice


def test_a_chain_that_bites_its_tail_ends():
    first, second = Failed(), Failed("text")
    first.__cause__, second.__cause__ = second, first
    assert why_unreachable(first)[0] == "Failed: text"
