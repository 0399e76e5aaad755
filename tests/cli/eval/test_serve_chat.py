"""``rollout demo --serve-chat``: the scripted model for evaluations of one's own."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import contextmanager

import httpx
import pytest
import trio
import trio.testing
from cli.harness import command_line, environment

from rollout.demo.arithmetic import MODEL_NAME, ScriptedModel
from rollout.demo.chat import create_chat_app


@contextmanager
def chat(*options: str, **env: str):
    """Serve the endpoint on a free port; yields the process and a client of it."""
    with subprocess.Popen(
        command_line("demo", "--serve-chat", "--bind", "127.0.0.1:0", "--think-sec", "0", *options),
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), process.stderr.read()
            with httpx.Client(base_url=line.split()[-1], trust_env=False, timeout=60) as http:
                yield process, http
        finally:
            if process.poll() is None:
                process.kill()


def ask(http, question="What is 6 * 7?", key=None, **more):
    messages = [{"role": "user", "content": question}]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL_NAME, "messages": messages, **more}
    return http.post("/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_answers_without_a_key_until_a_signal(number):
    with chat("--error-rate", "0") as (process, http):
        assert ask(http).json()["choices"][0]["message"]["content"] == "6 * 7 = 42"
        assert ask(http, key="any").status_code == 200
        process.send_signal(number)
        assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_the_seed_of_a_request_decides_about_its_answer():
    model = ScriptedModel(seed=3, error_rate=0.5)
    with chat("--seed", "3", "--error-rate", "0.5") as (_, http):
        answers = [
            ask(http, seed=seed).json()["choices"][0]["message"]["content"]
            for seed in (None, *range(12), 0)
        ]
        refused = ask(http, seed="1")
    expected = [model.answer("What is 6 * 7?", seed) for seed in (None, *range(12), 0)]
    assert answers == expected
    assert len(set(answers)) > 1
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "seed"


def test_each_repetition_of_a_question_is_another_draw():
    with chat("--error-rate", "0.5") as (_, http):
        answers = [ask(http).json()["choices"][0]["message"]["content"] for _ in range(12)]
        other = ask(http, "What is 2 + 2?").json()["choices"][0]["message"]["content"]
    model = ScriptedModel(error_rate=0.5)
    assert answers[0] == model.answer("What is 6 * 7?")
    assert len(set(answers)) > 2
    assert other == model.answer("What is 2 + 2?")


def test_asks_for_the_key_that_it_was_given():
    with chat("--api-key-env", "CHAT_KEY", CHAT_KEY="the-key") as (_, http):
        assert ask(http, key="the-key").status_code == 200
        assert ask(http).status_code == ask(http, key="other").status_code == 401


def test_a_request_that_is_too_large_leaves_its_connection_usable():
    with chat("--error-rate", "0") as (_, http):
        large = {"content-type": "application/json"}
        refused = http.post("/chat/completions", content=b" " * (17 << 20), headers=large)
        assert refused.status_code == 413
        assert "error" in refused.json()
        assert ask(http).json()["choices"][0]["message"]["content"] == "6 * 7 = 42"


@pytest.mark.parametrize("bind", ["0.0.0.0:9000", "[::]:9000", "example.org:9000"])
def test_what_others_can_reach_needs_a_key(cli, bind):
    line = cli.fails(2, "demo", "--serve-chat", "--bind", bind)
    assert "needs a key" in line
    assert "--api-key-env" in line


def test_an_address_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            command_line("demo", "--serve-chat", "--bind", bind),
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rollout: cannot listen on {bind}: ")
    assert done.stderr.endswith("choose another address with --bind (port 0 takes a free one)\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--serve-chat", "--bind", "9000"], "--bind takes HOST:PORT"),
        (["--serve-chat", "--bind", "127.0.0.1:x"], "the port must be a number"),
        (["--serve-chat", "--bind", "::1:80"], "--bind takes HOST:PORT"),
        (["--serve-chat", "--api-key-env", "ROLLOUT_TEST_UNSET"], "is not set"),
        (["--serve-chat", "--rollouts", "3"], "--rollouts does nothing with --serve-chat"),
        (["--serve-chat", "--json"], "--json does nothing with --serve-chat"),
        (["--bind", "127.0.0.1:0"], "--bind does nothing without --serve-chat"),
        (["--api-key-env", "A"], "--api-key-env does nothing without --serve-chat"),
    ],
)
def test_wrong_use(cli, options, words):
    assert words in cli.fails(2, "demo", *options)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/chat/completions", 401), ("/v1/models", 401), ("/elsewhere", 401)],
)
async def test_a_refusal_waits_for_the_body(path, status):
    """Answered before, the connection would hold a body that nobody reads, and be stuck."""
    app = create_chat_app(ScriptedModel(), "the-key")
    parts = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
    ]
    sent: list[dict] = []
    answered = trio.Event()

    async def receive():
        await trio.testing.wait_all_tasks_blocked()
        assert sent == []
        if parts:
            return parts.pop(0)
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        await trio.lowlevel.checkpoint()
        assert parts == []
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [(b"host", b"test"), (b"content-length", b"2")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    assert sent[0]["status"] == status
