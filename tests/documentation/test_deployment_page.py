"""The page on deployment: its figures, its units and its code do what they say."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import socket
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import trio
import trustme
from documentation.blocks import ROOT, defined_by, find
from support import CHAT_URL, fresh_id, in_process, local_backend, make_app, prompt, served

from rollout import AgentWorkflow, LocalBackend
from rollout.cli import main as cli
from rollout.client import RolloutClient
from rollout.server import ShutdownBudget, serve
from rollout.server.app import DEFAULT_RESULT_RETENTION_SEC, DEFAULT_RESULT_WAIT_TIMEOUT_SEC
from rollout.types import RolloutInitRequest

PAGE = "docs/deployment.md"
TEXT = (ROOT / PAGE).read_text("utf-8")
NGINX = shutil.which("nginx")


def numbers(pattern: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, TEXT)]
    assert found, pattern
    return found


def test_whoever_kills_waits_for_the_stages():
    budget = ShutdownBudget().total_sec
    for pattern in (
        r"TimeoutStopSec=(\d+)",
        r"terminationGracePeriodSeconds: (\d+)",
        r"docker stop --time (\d+)",
    ):
        assert all(budget < number <= budget + 30 for number in numbers(pattern))
    assert numbers(r"SIGTERM, and (\d+) seconds before a kill") == [budget]


def test_gateways_wait_for_longer_than_a_poll():
    assert numbers(r"wait at least (\d+) s") > [DEFAULT_RESULT_WAIT_TIMEOUT_SEC]
    assert numbers(r"proxy_read_timeout (\d+)s") > [DEFAULT_RESULT_WAIT_TIMEOUT_SEC + 10]
    assert numbers(r"`result_retention_sec` \((\d+)\)") == [DEFAULT_RESULT_RETENTION_SEC]


@pytest.mark.parametrize(
    "line",
    [
        *re.findall(r"^ExecStart=\S+/bin/(rollout .+)$", TEXT, re.MULTILINE),
        *re.findall(r"^\$ (rollout serve (?s:.*?)[^\\])$", TEXT, re.MULTILINE),
        *(
            re.sub(r'[",\[\]]', " ", line)
            for line in re.findall(r"(?:CMD|command:) (\[.+\])", TEXT)
        ),
    ],
)
def test_a_command_line_is_one_that_is_taken(line):
    name, *arguments = shlex.split(line.replace("\\\n", " "))[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.make_context(name, arguments).params["app"] == "my_server.py:app"


def test_every_server_of_the_set_has_its_address_while_it_stops():
    manifest = find(PAGE, "kind: StatefulSet", "yaml").code
    assert "clusterIP: None" in manifest
    assert "publishNotReadyAddresses: true" in manifest
    assert "livenessProbe" not in manifest


def test_the_unit_is_one():
    unit = find(PAGE, "[Service]", "ini").code
    assert re.findall(r"^\[(\w+)\]$", unit, re.MULTILINE) == ["Unit", "Service", "Install"]
    keys = [line.split("=")[0] for line in unit.splitlines() if "=" in line]
    assert len(keys) == len(set(keys))


@pytest.mark.usefixtures("readers_own_modules")
async def test_the_queue_is_so_short_that_nobody_times_out_in_it(autojump_clock):
    page = defined_by(find(PAGE, "def rollouts_at_a_time"))
    sizes = page["rollouts_at_a_time"](64, run_sec=30, agent_timeout_sec=120)
    assert (sizes.max_concurrent, sizes.max_queue_depth) == (64, 128)

    class Works(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            await trio.sleep(30)
            return ctx.prompt

    app = make_app(local_backend(Works, max_concurrent=4, max_queue_depth=8))
    async with in_process(app, admission_timeout_sec=0.5) as client:
        handles = [
            await client.run_rollout_async(
                prompt(), CHAT_URL, fresh_id(), grade=False, agent_timeout_sec=120
            )
            for _ in range(12)
        ]
        assert [(await handle).status for handle in handles] == ["success"] * 12


async def test_every_line_names_its_rollout(autojump_clock):
    with_rollout = defined_by(find(PAGE, "class WithRollout"))["WithRollout"]

    class Says(AgentWorkflow[Any]):
        def run(self, ctx: Any) -> Any:
            logging.getLogger("my_package").warning("said in a thread")
            return ctx.prompt

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    handler.addFilter(with_rollout())
    logger = logging.getLogger("my_package")
    logger.addHandler(handler)
    try:
        async with in_process(make_app(LocalBackend(workflow=Says))) as client:
            await client.run_rollout(prompt(), CHAT_URL, "the-rollout", grade=False)
        logger.warning("said outside")
    finally:
        logger.removeHandler(handler)
    ids = [(record.getMessage(), vars(record)["rollout_id"]) for record in records]
    assert ids == [("said in a thread", "the-rollout"), ("said outside", "-")]


async def test_the_logging_of_the_page_can_be_set_up(capfd):
    log_with_rollouts = defined_by(find(PAGE, "def log_with_rollouts"))["log_with_rollouts"]
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    level, http = root.level, {n: logging.getLogger(n).level for n in ("httpx", "httpx2")}
    root.handlers = []
    try:
        log_with_rollouts()
        logging.getLogger("rollout.somewhere").warning("a line")
    finally:
        root.handlers = before
        root.setLevel(level)
        for name, was in http.items():
            logging.getLogger(name).setLevel(was)
    assert capfd.readouterr().err.rstrip().endswith("WARNING rollout.somewhere [-]: a line")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a certificate for localhost, and one for a client."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("localhost", "client"):
        issued = authority.issue_cert(name)
        issued.private_key_pem.write_to_path(str(folder / f"{name}-key.pem"))
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        (folder / f"{name}.pem").write_bytes(chain)
    return folder


async def test_a_client_that_shows_a_certificate(certificates):
    client_for = defined_by(find(PAGE, "def client_with_certificate"))["client_with_certificate"]
    own = [str(certificates / name) for name in ("ca.pem", "client.pem", "client-key.pem")]
    options = {
        "certfile": str(certificates / "localhost.pem"),
        "keyfile": str(certificates / "localhost-key.pem"),
        "ca_certs": own[0],
    }
    async with trio.open_nursery() as nursery:
        start = partial(serve, make_app(), bind="localhost:0", handle_signals=False, **options)
        (url, *_) = await nursery.start(start)
        url = f"https://localhost:{httpx.URL(url).port}"
        client, http = client_for(url, *own)
        async with http, client:
            result = await client.run_rollout(prompt(), CHAT_URL, "a", grade=False)
        nursery.cancel_scope.cancel()
    assert result.status == "success"


@pytest.mark.skipif(NGINX is None, reason="nginx is missing")
async def test_feed_and_polls_go_through_nginx(certificates, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    async with served(make_app()) as server:
        site = find(PAGE, "proxy_pass", "nginx").code
        for written, here in {
            "127.0.0.1:8000": server.removeprefix("http://"),
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "/etc/rollout/chain.pem": str(certificates / "localhost.pem"),
            "/etc/rollout/key.pem": str(certificates / "localhost-key.pem"),
        }.items():
            assert written in site
            site = site.replace(written, here)
        temporary = "".join(
            f"{kind}_temp_path {tmp_path / kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        log = tmp_path / "access.log"
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; master_process off; pid {tmp_path / 'pid'}; error_log stderr notice;\n"
            f"events {{}}\nhttp {{\naccess_log {log};\n{temporary}{site}}}\n"
        )
        command = [NGINX, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
        process = await trio.to_thread.run_sync(partial(_started, command))
        try:
            requests = [
                RolloutInitRequest(
                    rollout_id=fresh_id(),
                    initial_messages=prompt(padding="x" * 200_000, sleep=0.05),
                    chat_completions_url=CHAT_URL,
                    grade=False,
                )
                for _ in range(30)
            ]
            async with RolloutClient(url=f"https://localhost:{port}") as client:
                async with client.run_rollouts(requests, max_in_flight=10) as finished:
                    statuses = [outcome.status async for _, outcome in finished]
        finally:
            process.terminate()
            await trio.to_thread.run_sync(process.wait)
            process.stderr.close()
    assert statuses == ["success"] * 30
    asked = log.read_text()
    assert '/rollouts/feed HTTP/1.1" 200' in asked
    assert "/result" not in asked  # nobody had to poll


def _started(command: list[Any]) -> subprocess.Popen[str]:
    """Start nginx and wait until it says that it listens."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "using the" in line and "event method" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process
    raise AssertionError("nginx ended early")
