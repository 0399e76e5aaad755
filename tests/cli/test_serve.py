"""``rollout serve``: as a process of its own, since it ends with a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request

import httpx
import pytest
import trio
import trustme
from cli.harness import TESTS, command_line, environment, serving
from cryptography.hazmat.primitives import serialization
from support import CHAT_URL, fresh_id, prompt

from rollout.cli.options import host_of
from rollout.client import RolloutClient
from rollout.types import POLLING_LEASE_HEADER

FREE = ("--bind", "127.0.0.1:0")


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("reference", "number"),
    [
        ("cli_apps:app", signal.SIGTERM),
        ("cli_apps.py:factory", signal.SIGTERM),
        ("cli_apps:app", signal.SIGINT),
    ],
)
def test_says_where_it_listens_and_exits_with_0_on_a_signal(apps, reference, number):
    with serving(apps, reference, *FREE) as (process, url):
        assert httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok"
        process.send_signal(number)
        code, out, err = finish(process)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


def test_says_where_the_files_of_rollouts_go(apps, tmp_path):
    kept = str(tmp_path / "kept")
    with serving(apps, "cli_apps:app", *FREE, ROLLOUT_ARTIFACT_ROOT=kept) as (process, _):
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    assert code == 0
    assert f"files of rollouts are kept in {kept}\n" in err


@pytest.mark.parametrize("verbose", [False, True])
def test_a_failed_agent_has_its_traceback_with_verbose_alone(apps, verbose):
    options = ["--verbose"] if verbose else []
    with serving(apps, "cli_apps:app", *FREE, *options) as (process, url):
        trio.run(run_one, url, {"raise": "boom"})
        process.send_signal(signal.SIGTERM)
        _, _, err = finish(process)
    assert "RuntimeError: boom" in err
    assert ("Traceback" in err) is verbose
    assert (f"{TESTS / 'support.py'}, line " in err) is not verbose


async def run_one(url, script):
    async with RolloutClient(url=url) as client:
        return await client.run_rollout(prompt(**script), CHAT_URL, fresh_id(), grade=False)


def test_a_killed_server_leaves_its_results_to_the_next_one(apps, tmp_path):
    state = ("--state", str(tmp_path / "state"))
    body = {"rollout_id": "r", "initial_messages": prompt(), "chat_completions_url": CHAT_URL}

    def result(url, token):
        lease = {POLLING_LEASE_HEADER: token}
        return httpx.get(f"{url}/rollout/r/result", headers=lease, trust_env=False)

    with serving(apps, "cli_apps:app", *FREE, *state) as (process, url):
        admitted = httpx.post(f"{url}/rollout", json={**body, "grade": False}, trust_env=False)
        token = admitted.json()["polling_lease_token"]
        while (before := result(url, token)).json()["status"] != "success":
            pass
        process.kill()
    with serving(apps, "cli_apps:app", *FREE, *state) as (process, url):
        assert result(url, token).content == before.content
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 0


WARMING = """
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from support import make_app


@asynccontextmanager
async def lifespan(app):
    print("warming up", flush=True)
    try:
        await trio.sleep_forever()
        yield
    finally:
        Path("tidied").touch()


app = make_app(lifespan=lifespan)
"""


def test_a_signal_while_it_starts_lets_the_lifespan_tidy_up(tmp_path):
    (tmp_path / "warming.py").write_text(WARMING)
    with subprocess.Popen(
        command_line("serve", "warming.py:app", *FREE),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "warming up\n"
        process.terminate()
        code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM
    assert "the server had not started" in err
    assert "Traceback" not in err
    assert (tmp_path / "tidied").exists()


def test_file_in_another_folder_and_its_neighbours(apps, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "neighbour.py").write_text("from support import make_app\n")
    (folder / "types.py").write_text("import neighbour\napp = neighbour.make_app()\n")
    with serving(tmp_path, "project/types.py:app", *FREE) as (process, _):
        process.terminate()
        assert finish(process)[0] == 0


def test_callers_get_their_results_while_it_shuts_down(apps):
    async def use(process, url):
        async with RolloutClient(url=url) as client:
            handles = [
                await client.run_rollout_async(
                    prompt(sleep=60),
                    "http://x",
                    f"r{i}",
                    grade=False,
                )
                for i in range(3)
            ]
            process.terminate()
            return [(await handle).status for handle in handles]

    with serving(apps, "cli_apps:app", *FREE, "--drain-sec", "0") as (process, url):
        assert trio.run(use, process, url) == ["cancelled"] * 3
        assert finish(process)[0] == 0


def test_ends_by_force_when_executions_do_not_stop(apps):
    short = ("--drain-sec=0", "--cleanup-sec=0.1", "--forced-sec=0.1", "--delivery-sec=5")

    async def use(process, url):
        async with RolloutClient(url=url) as client:
            handle = await client.run_rollout_async(
                [{"role": "user", "content": "?"}], "http://x", "stuck", grade=False
            )
            await handle.wait_for_running()
            process.terminate()
            return await handle

    with serving(apps, "cli_apps:stubborn", *FREE, *short) as (process, url):
        result = trio.run(use, process, url)
        assert result.status == "cancelled"
        assert "did not stop in time" in result.err_message
        code, _, err = finish(process)
    assert code == 3
    assert "ending the process by force: 1 execution(s) did not stop" in err


def test_ends_by_force_when_the_event_loop_is_blocked(apps):
    hasty = (
        "import sys, rollout.cli.serve as serve\n"
        "serve._CLOSING_SEC = 0.1\n"
        "from rollout.cli import main\n"
        "main(['serve', *sys.argv[1:]])\n"
    )
    stages = ("drain", "cleanup", "forced", "delivery", "backend")
    none = [f"--{stage}-sec=0" for stage in stages]

    async def use(process, url):
        async with RolloutClient(url=url) as client, trio.open_nursery() as nursery:
            nursery.start_soon(
                client.run_rollout, prompt(), "http://x", "b", None, None, None, False
            )
            assert await trio.to_thread.run_sync(process.stdout.readline) == "blocking\n"
            process.terminate()
            nursery.cancel_scope.cancel()

    command = [sys.executable, "-c", hasty]
    with serving(apps, "cli_apps:blocking", *FREE, *none, command=command) as (process, url):
        trio.run(use, process, url)
        code, _, err = finish(process)
    assert code == 3, err
    assert "ending the process by force: the shutdown does not end" in err


def test_port_in_use(cli, apps, monkeypatch):
    monkeypatch.chdir(apps)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli("serve", "cli_apps:app", "--bind", address)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rollout: cannot listen on {address}: Address already in use; ")
    assert "--bind" in done.stderr
    assert done.stderr.count("\n") == 1


def test_tls(apps, tmp_path):
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = ("--certfile", str(tmp_path / "cert.pem"), "--keyfile", str(tmp_path / "key.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with serving(apps, "cli_apps:app", *FREE, *files) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        with urllib.request.urlopen(f"{url}/health", context=context) as answer:
            assert json.load(answer)["status"] == "ok"
        process.terminate()
        assert finish(process)[0] == 0


@pytest.fixture
def encrypted(tmp_path):
    """Options for a certificate whose key has the password ``secret``."""
    cert = trustme.CA().issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(cert.private_key_pem.bytes(), None)
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    return ("--certfile", str(tmp_path / "cert.pem"), "--keyfile", str(tmp_path / "key.pem"))


def test_encrypted_key(apps, encrypted):
    password = ("--keyfile-password-env", "TLS_PASSWORD")
    with serving(apps, "cli_apps:app", *FREE, *encrypted, *password, TLS_PASSWORD="secret") as (
        process,
        url,
    ):
        assert url.startswith("https://")
        process.terminate()
        assert finish(process)[0] == 0


def test_encrypted_key_without_password_does_not_ask_the_terminal(cli, encrypted):
    assert "--keyfile-password-env" in cli.fails(2, "serve", "cli_apps:app", *encrypted)


def test_wrong_password(cli, apps, encrypted, monkeypatch):
    monkeypatch.chdir(apps)
    line = cli.fails(
        2, "serve", "cli_apps:app", *FREE, *encrypted, "--keyfile-password-env", "TLS_PASSWORD",
        TLS_PASSWORD="not-this-one",
    )  # fmt: skip
    assert "TLS" in line
    assert "not-this-one" not in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--certfile", "missing.pem"], "both a certfile and a keyfile"),
        (["--certfile", "missing.pem", "--keyfile", "missing.pem"], "there is no file missing.pem"),
        (["--drain-sec", "-1"], "--drain-sec must be a finite number from 0 up"),
        (["--drain-sec", "nan"], "must be a finite number of seconds"),
        (["--cleanup-sec", "soon"], "is not a number of seconds"),
        (["--bind", "127.0.0.1"], "HOST:PORT"),
        (["--bind", "::1:80"], "HOST:PORT"),
        (["--bind", ":80"], "HOST:PORT"),
        (["--bind", "fd://3"], "HOST:PORT"),
        (["--bind", "unix:"], "HOST:PORT"),
        (["--bind", "127.0.0.1:99999"], "from 0 to 65535"),
        (["--bind", "127.0.0.1:http"], "from 0 to 65535"),
        (["--bind", f"127.0.0.1:{'9' * 5000}"], "from 0 to 65535"),
        (["--bind", "no-such-host.invalid:0"], "cannot listen on no-such-host.invalid:0"),
    ],
)
def test_options_that_cannot_work(cli, apps, monkeypatch, options, words):
    monkeypatch.chdir(apps)
    assert words in cli.fails(2, "serve", "cli_apps:app", *options)


@pytest.mark.parametrize(
    ("bind", "host"),
    [("127.0.0.1:0", "127.0.0.1"), ("localhost:65535", "localhost"), ("[::1]:80", "::1")],
)
def test_binds_that_are_fine(bind, host):
    assert host_of(bind) == host


def test_failing_lifespan_is_named_with_its_place(cli, tmp_path, monkeypatch):
    (tmp_path / "warming.py").write_text(
        "from contextlib import asynccontextmanager\n"
        "from support import make_app\n"
        "@asynccontextmanager\n"
        "async def lifespan(app):\n"
        "    raise LookupError('no model here')\n"
        "    yield\n"
        "app = make_app(lifespan=lifespan)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = cli("serve", "warming.py:app", *FREE)
    assert (result.exit_code, result.stdout) == (2, "")
    line = result.stderr.strip()
    assert "LookupError: no model here" in line
    assert line.endswith(f"{tmp_path / 'warming.py'}, line 5)")


def test_unix_socket(apps, tmp_path):
    path = os.path.relpath(tmp_path / "s", apps)
    with subprocess.Popen(
        command_line("serve", "cli_apps:app", "--bind", f"unix:{path}"),
        cwd=apps,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "unix:" in process.stdout.readline()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "s"))) as http:
            assert http.get("http://server/health").status_code == 200
        process.terminate()
        assert finish(process)[0] == 0
