"""The documentation is run: its Python blocks, its bodies, its figures, and both examples."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import hypercorn.trio
import pytest
import trio
from attrs import frozen
from hypercorn.config import Config
from quart import request
from quart_trio import QuartTrio
from support import (
    CHAT_URL,
    Compare,
    Script,
    fresh_id,
    in_process,
    local_backend,
    make_app,
    prompt,
    served,
)

from rollout import AgentWorkflow, LocalBackend
from rollout.cli import main as cli
from rollout.client import RolloutClient, RolloutProtocolError
from rollout.codec import structure
from rollout.demo.arithmetic import MODEL_NAME, ScriptedModel, last_number
from rollout.demo.chat import create_chat_app
from rollout.rules.retry import GATEWAY_RETRY_DELAYS_SEC, TRANSPORT_RETRY_DELAYS_SEC
from rollout.server import ShutdownBudget, create_rollout_server
from rollout.server.app import (
    DEFAULT_POLLING_LEASE_TIMEOUT_SEC,
    DEFAULT_RESULT_RETENTION_SEC,
    DEFAULT_RESULT_WAIT_TIMEOUT_SEC,
    RETRY_AFTER_SEC,
)
from rollout.types import (
    CancelRolloutsResponse,
    RolloutErrorCategory,
    RolloutInitResponse,
    RolloutLifecycle,
    RolloutResultResponse,
    RolloutStatus,
)

ROOT = Path(__file__).parent.parent
README = "README.md"
SDK = "docs/rollout-sdk.md"
CLI = "docs/cli.md"
SERVER = "docs/server.md"
PROTOCOL = "docs/protocol.md"
PAGES = [README, "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

SERVER_URL_IN_TEXT = "http://127.0.0.1:8000"
CHAT_URL_IN_TEXT = "http://127.0.0.1:9000/v1"


@frozen
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def compiled(self) -> Any:
        # The line feeds put the lines of a traceback where they are in the page.
        return compile("\n" * self.line + self.code, str(ROOT / self.page), "exec")


def _blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["code"])
        for match in re.finditer(
            r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", text, re.MULTILINE | re.DOTALL
        )
    ]


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def find(page: str, marker: str, language: str = "python") -> Block:
    """The one block of a page that holds *marker*."""
    (found,) = (
        block
        for block in BLOCKS
        if block.page == page and block.language == language and marker in block.code
    )
    return found


def defined_by(block: Block, **names: Any) -> dict[str, Any]:
    """What a block defines, when it stands in a module that has *names* already."""
    namespace: dict[str, Any] = {"__name__": "documented", **names}
    exec(block.compiled, namespace)  # the project's own text
    return namespace


# --- every block ------------------------------------------------------------------------------


def test_there_are_blocks_to_test():
    assert {block.page for block in PYTHON} >= {README, SDK, SERVER}


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_compiles_and_what_it_imports_exists(block):
    imports = [
        node
        for node in ast.walk(ast.parse(block.code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert block.compiled
    exec(compile(ast.Module(imports, []), str(block), "exec"), {})


@pytest.mark.parametrize(
    "block", [block for block in PYTHON if "\ntrio.run(" not in block.code], ids=str
)
def test_a_block_that_defines_things_runs(block, monkeypatch):
    agent = ModuleType("my_package.agent")
    agent.Solve, agent.Exact = Script, Compare
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.agent", agent)
    monkeypatch.setenv("ROLLOUT_SERVER_API_KEY", "a-key-of-the-server")
    given = {"backend": LocalBackend(workflow=Script)}
    new = defined_by(block, **given).keys() - given.keys() - {"__name__", "__builtins__"}
    assert new


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page):
    text = (ROOT / page).read_text("utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if ":" not in target]
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


# --- what runs against a server ---------------------------------------------------------------


def chat_app(keys: list[str]) -> QuartTrio:
    """An OpenAI-compatible endpoint that does sums; it notes the keys that it is shown."""
    app = QuartTrio("chat")
    model = ScriptedModel(error_rate=0)

    @app.post("/v1/chat/completions")
    async def complete() -> dict[str, Any]:
        keys.append(request.headers.get("Authorization", ""))
        body = await request.get_json()
        answer = last_number(model.answer(body["messages"][-1]["content"]))
        return {"choices": [{"message": {"role": "assistant", "content": answer}}]}

    return app


@asynccontextmanager
async def chat_endpoint(app: QuartTrio) -> AsyncGenerator[str, None]:
    """Serve a chat endpoint on a free port for the length of the block; yields its URL."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(hypercorn.trio.serve, app, config, shutdown_trigger=trio.sleep_forever)
        )
        yield f"{urls[0]}/v1"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def rollout_serve(file: Path, **env: str) -> AsyncGenerator[str, None]:
    """``rollout serve`` on a free port, until the end of the block, and then SIGTERM."""
    command = [sys.executable, "-m", "rollout.cli", "serve", f"{file}:app", "--bind=127.0.0.1:0"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(trio.run_process, command, stdout=subprocess.PIPE, env={**os.environ, **env})
        )
        line = b""
        while not line.endswith(b"\n"):
            received = await process.stdout.receive_some()
            assert received, "rollout serve ended early"
            line += received
        try:
            yield re.search(r"http://\S+", line.decode())[0]
        finally:
            process.send_signal(signal.SIGTERM)
    # run_process has raised if the exit code was not 0.


async def run_python(*arguments: str, **env: str) -> str:
    """What a Python program prints; it must succeed and be silent otherwise."""
    done = await trio.run_process(
        [sys.executable, "-W", "error", *arguments],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env={**os.environ, **env},
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    return done.stdout.decode()


def placed(block: Block, server_url: str, chat_url: str) -> str:
    """The code of a client example, with the addresses of this test in it."""
    for written in (SERVER_URL_IN_TEXT, CHAT_URL_IN_TEXT):
        assert written in block.code
    return block.code.replace(SERVER_URL_IN_TEXT, server_url).replace(CHAT_URL_IN_TEXT, chat_url)


async def test_the_readme_from_server_to_reward(tmp_path):
    file = tmp_path / "my_server.py"
    file.write_text(find(README, "class Solve").code, "utf-8")
    keys: list[str] = []
    async with chat_endpoint(chat_app(keys)) as chat_url, rollout_serve(file) as url:
        code = placed(find(README, "trio.run(main)"), url, chat_url)
        printed = await run_python("-c", code, ROLLOUT_LLM_API_KEY="a-key-of-the-model")
    assert printed == "success 1.0\n"
    assert keys == ["Bearer a-key-of-the-model"]


async def test_the_guide_from_server_to_reward():
    app = defined_by(find(SDK, "class Solve"))["app"]
    keys: list[str] = []
    async with chat_endpoint(chat_app(keys)) as chat_url, served(app) as url:
        code = placed(find(SDK, "trio.run(main)"), url, chat_url)
        printed = await run_python("-c", code, ROLLOUT_LLM_API_KEY="a-key-of-the-model")
    assert printed == "success 1.0\n"
    assert keys == ["Bearer a-key-of-the-model"]


@pytest.mark.parametrize("page", [README, SDK])
async def test_the_tracking_example(page, capsys):
    track_rollout = defined_by(find(page, "async def track_rollout"))["track_rollout"]
    app = defined_by(find(SDK, "class Solve"))["app"]
    async with (
        chat_endpoint(chat_app([])) as chat_url,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        result = await track_rollout(client, chat_url)
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == 1.0
    printed = capsys.readouterr().out.split()
    assert printed == sorted(printed, key=list(RolloutStatus).index)
    assert printed[-1] in {"grading", "success"}


async def test_the_guide_runs_many_at_a_time():
    app = defined_by(find(SDK, "class Solve"))["app"]
    run_all = defined_by(find(SDK, "async def run_all"))["run_all"]
    questions = {fresh_id(): f"What is {number} + 1?" for number in range(12)}
    async with (
        chat_endpoint(chat_app([])) as chat_url,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        results = await run_all(client, chat_url, questions, max_in_flight=5)
    answers = {name: result.sample.messages[-1]["content"] for name, result in results.items()}
    assert answers == {name: str(number + 1) for number, name in enumerate(questions)}


async def test_the_guide_prints_phases(autojump_clock, capsys):
    print_phases = defined_by(find(SDK, "async def print_phases"))["print_phases"]
    async with in_process(make_app()) as client:
        handle = await client.run_rollout_async(
            prompt(sleep=60), CHAT_URL, "a", metadata={"grader": {"sleep": 60}}
        )
        await print_phases(handle)
    assert capsys.readouterr().out.split() == [
        *("a", "queued"),
        *("a", "running"),
        *("a", "grading"),
        *("a", "success"),
    ]


async def test_the_guide_cancels_and_waits(autojump_clock):
    cancel_and_wait = defined_by(find(SDK, "async def cancel_and_wait"))["cancel_and_wait"]
    async with in_process(make_app()) as client:
        handle = await client.run_rollout_async(prompt(sleep=3600), CHAT_URL, "a", label="42")
        await handle.wait_for_running()
        result = await cancel_and_wait(client, handle)
    assert result.status is RolloutStatus.CANCELLED
    assert trio.current_time() < 60


async def test_the_guide_waits_at_most_so_long(autojump_clock):
    wait_at_most = defined_by(find(SDK, "async def wait_at_most"))["wait_at_most"]
    async with in_process(make_app()) as client:
        slow = await client.run_rollout_async(prompt(sleep=3600), CHAT_URL, "slow", label="42")
        assert await wait_at_most(client, slow, 5) is None
        assert (await slow).status is RolloutStatus.CANCELLED
        quick = await client.run_rollout_async(prompt(sleep=1), CHAT_URL, "quick", label="42")
        assert await wait_at_most(client, quick, 5) is await quick


async def test_the_guide_authenticates(monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_API_KEY", "a-key-of-the-server")
    app = defined_by(
        find(SDK, "app = create_rollout_server(\n    backend=backend"),
        backend=LocalBackend(workflow=Script),
    )["app"]
    async with served(app) as url:
        block = find(SDK, "client = RolloutClient(\n")
        assert SERVER_URL_IN_TEXT in block.code
        code = block.code.replace(SERVER_URL_IN_TEXT, url)
        client = defined_by(Block(block.page, block.line, block.language, code))["client"]
        assert (await client.health())["status"] == "ok"
        await client.aclose()
        async with RolloutClient(url=url) as stranger:
            with pytest.raises(RolloutProtocolError) as caught:
                await stranger.health()
        assert caught.value.status_code == 401


async def test_the_guide_waits_until_idle(autojump_clock):
    wait_until_idle = defined_by(find(SDK, "async def wait_until_idle"))["wait_until_idle"]
    async with in_process(make_app()) as client:
        await client.run_rollout_async(prompt(sleep=50), CHAT_URL, "a", label="42")
        await wait_until_idle(client)
        assert 50 <= trio.current_time() < 60
        assert (await client.health())["lifecycle"]["active_rollouts"] == 0


async def test_the_guides_own_backend(autojump_clock):
    parrot = defined_by(find(SDK, "class Parrot"))["Parrot"]()
    async with in_process(make_app(parrot)) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a")
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.messages == prompt() * 2
    assert result.agent_started_at is not None


async def test_what_the_guide_repeats_is_what_has_cost_nothing(autojump_clock):
    worth = defined_by(find(SDK, "def worth_another_attempt"))["worth_another_attempt"]
    app = make_app(LocalBackend(workflow=Script), polling_lease_timeout_sec=120)
    async with in_process(app) as client:
        for number in range(4):  # as many as there are slots
            await client.run_rollout_async(prompt(sleep=60), CHAT_URL, str(number), grade=False)
        in_queue = await client.run_rollout(
            prompt(), CHAT_URL, "in-queue", grade=False, agent_timeout_sec=5
        )
        after_start = await client.run_rollout(
            prompt(**{"raise": "boom"}), CHAT_URL, "after-start", grade=False
        )
        ungradable = await client.run_rollout(prompt(), CHAT_URL, "ungradable", label="42")
        success = await client.run_rollout(prompt(), CHAT_URL, "success", grade=False)
    assert in_queue.err_category is RolloutErrorCategory.TIMEOUT
    assert ungradable.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert [worth(r) for r in (in_queue, after_start, ungradable, success)] == [
        True,
        False,
        False,
        False,
    ]


async def test_a_lifespan_sets_context_variables_for_every_rollout(autojump_clock):
    page = defined_by(find(SERVER, "async def lifespan"))

    class UsesTheClient(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return [{"closed": page["http_client"].get().is_closed}]

    app = create_rollout_server(
        backend=LocalBackend(workflow=UsesTheClient),
        lifespan=page["lifespan"],
        configure_logging=False,
    )
    async with in_process(app) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a", grade=False)
    assert result.sample.messages == [{"closed": False}]


async def test_the_server_page_serves_for_a_moment():
    serve_for_a_moment = defined_by(find(SERVER, "async def serve_for_a_moment"))[
        "serve_for_a_moment"
    ]
    health = await serve_for_a_moment(make_app())
    assert health["lifecycle"] == {"accepting_rollouts": True, "active_rollouts": 0}


# --- examples ---------------------------------------------------------------------------------


async def test_the_examples_work_together():
    examples = ROOT / "examples"
    keys = {"ROLLOUT_SERVER_API_KEY": "a-key-of-the-server", "ROLLOUT_LLM_API_KEY": "a-key"}
    model = create_chat_app(ScriptedModel(error_rate=0, think_sec=0), keys["ROLLOUT_LLM_API_KEY"])
    async with (
        chat_endpoint(model) as chat_url,
        rollout_serve(examples / "arithmetic_server.py", ROLLOUT_MODEL=MODEL_NAME, **keys) as url,
    ):
        printed = await run_python(str(examples / "run_client.py"), url, chat_url, **keys)
    *rewards, summary = printed.splitlines()
    assert [line.split("?")[1].strip() for line in rewards] == ["reward 1.0"] * 6
    assert summary == "mean reward 1.00 over 6 rollouts"


async def test_the_example_client_says_what_went_wrong():
    class Fails(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            await trio.lowlevel.checkpoint()
            raise RuntimeError("boom")

    client = str(ROOT / "examples/run_client.py")
    async with served(make_app(local_backend(Fails))) as url:
        done = await trio.run_process(
            [sys.executable, client, url, CHAT_URL], capture_stdout=True, check=False
        )
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert [line.split("?")[1].strip() for line in lines] == ["failure: boom (agent_error)"] * 6


# --- command line -----------------------------------------------------------------------------


def _section(text: str, heading: str) -> str:
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_a_command_is_described_with_its_options_and_defaults(name):
    section = _section((ROOT / CLI).read_text("utf-8"), f"rollout {name}")
    command = cli.get_command(click.Context(cli), name)
    options = [item for item in command.params if isinstance(item, click.Option)]
    names = {name for option in options for name in option.opts if name != "--help"}
    assert {name for name in names if f"`{name}`" not in section} == set()
    assert set(re.findall(r"`(--[a-z-]+)`", section)) <= names
    for option in options:
        if type(option.default) in {int, float}:
            assert re.search(rf"`{option.opts[0]}` \| {option.default:g} \|", section)
    assert f"`rollout {name}" in (ROOT / README).read_text("utf-8")


# --- bodies and figures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marker", "kind"),
    [
        ('"polling_lease_token"', RolloutInitResponse),
        ('"agent_started_at"', RolloutResultResponse),
        ('"dispositions"', CancelRolloutsResponse),
    ],
)
def test_a_body_of_the_protocol_page_fits_its_type(marker, kind):
    body = json.loads(find(PROTOCOL, marker, "json").code)
    structure(body, kind)
    assert set(body) == {attribute.name for attribute in kind.__attrs_attrs__}


async def test_the_health_of_the_protocol_page_has_the_fields_of_a_real_one(autojump_clock):
    documented = json.loads(find(PROTOCOL, '"lifecycle"', "json").code)
    structure(documented["lifecycle"], RolloutLifecycle)
    async with in_process(make_app()) as client:
        real = await client.health()
    assert documented.keys() == real.keys()
    assert documented["concurrency"].keys() == real["concurrency"].keys()


def _listed(delays: tuple[float, ...]) -> str:
    return ", ".join(f"{delay:g} s" for delay in delays)


@pytest.mark.parametrize(
    ("page", "row"),
    [
        (SDK, f"`httpx.ReadTimeout` | {_listed(TRANSPORT_RETRY_DELAYS_SEC)} |"),
        (SDK, f"| HTTP 502, 503, 504 | {_listed(GATEWAY_RETRY_DELAYS_SEC)} |"),
        (SDK, f"| a poll is held for | {DEFAULT_RESULT_WAIT_TIMEOUT_SEC:g} s |"),
        (SDK, f"| the lease lasts, without a poll | {DEFAULT_POLLING_LEASE_TIMEOUT_SEC:g} s |"),
        (SDK, f"| a terminal result is kept for | {DEFAULT_RESULT_RETENTION_SEC:g} s |"),
        (SDK, f"| `Retry-After` on 429 | {RETRY_AFTER_SEC} s |"),
        (SERVER, f"| {ShutdownBudget().drain_sec:g} s (`drain_sec`) |"),
        (SERVER, f"| {ShutdownBudget().cleanup_sec:g} s (`cleanup_sec`) |"),
        (SERVER, f"| {ShutdownBudget().forced_sec:g} s (`forced_sec`) |"),
        (SERVER, f"| {ShutdownBudget().delivery_sec:g} s (`delivery_sec`) |"),
        (SERVER, f"| {ShutdownBudget().backend_sec:g} s (`backend_sec`) |"),
        (SERVER, f"their sum\nbefore it kills: {ShutdownBudget().total_sec:g} seconds"),
    ],
)
def test_a_figure_is_that_of_the_code(page, row):
    assert row in (ROOT / page).read_text("utf-8")


def test_the_settings_for_another_server_leave_time_for_the_stages():
    settings = tomllib.loads(find(SERVER, "shutdown_timeout", "toml").code)
    assert settings["graceful_timeout"] > DEFAULT_RESULT_WAIT_TIMEOUT_SEC
    assert settings["shutdown_timeout"] > ShutdownBudget().total_sec
    assert hasattr(Config(), "graceful_timeout")
    assert hasattr(Config(), "shutdown_timeout")


def test_the_changelog_has_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"\n## {project['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
