"""Each message on the page about trouble is one that the library says, word for word."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trio
from cli.harness import RUNNER
from documentation.blocks import README, ROOT, defined_by, find
from support import CHAT_URL, Script, fresh_id, in_process, local_backend, make_app, prompt, served
from trio.testing import MockClock

from rollout import AgentWorkflow, Grader, LocalBackend
from rollout.cli import main as cli
from rollout.client import RolloutClient
from rollout.errors import RolloutServerError, TrajectoryUnavailableError
from rollout.pool import LocalWorkers, PoolBackend
from rollout.pool.backend import judge
from rollout.pool.worker import Attempt
from rollout.server import serve
from rollout.server.state import SQLiteStore
from rollout.types import ExecutionOutcome

PAGE = "docs/troubleshooting.md"
PHRASES = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / PAGE).read_text("utf-8"))
REQUEST: dict[str, Any] = {
    "initial_messages": prompt(),
    "chat_completions_url": "http://model/v1",
    "rollout_id": "a",
}


class NeedsAsyncio(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        await asyncio.sleep(1)


class Forgets(Grader):
    def grade(self, ctx: Any) -> None:
        pass


@contextmanager
def logged(said: list[str]) -> Iterator[None]:
    """Collect what the library logs in the block."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("rollout")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


async def refusal(client: RolloutClient, **changes: Any) -> str:
    with pytest.raises(Exception) as caught:
        await client.run_rollout(**{**REQUEST, **changes})
    return str(caught.value)


async def failure(backend: LocalBackend, **changes: Any) -> str:
    async with in_process(make_app(backend)) as client:
        result = await client.run_rollout(**{**REQUEST, **changes})
    assert result.status == "failure"
    assert result.err_message is not None
    return str(result.err_message)


async def failures() -> list[str]:
    """What rollouts fail with, in simulated time."""
    slow = prompt(sleep=3600)
    answers = local_backend()
    return [
        await failure(LocalBackend(workflow=Script), label="42"),
        await failure(answers),
        await failure(local_backend(Script, Forgets), label="42"),
        await failure(local_backend(), initial_messages=prompt(**{"return": "42"}), grade=False),
        await failure(answers, initial_messages=slow, agent_timeout_sec=60, grade=False),
        await failure(answers, metadata={"grader": {"sleep": 3600}}, grader_timeout_sec=5),
        await failure(local_backend(NeedsAsyncio), grade=False),
    ]


async def refusals() -> list[str]:
    """What the client raises, in simulated time."""
    said: list[str] = []
    async with in_process(make_app()) as client:
        body = {**REQUEST, "initial_messages": prompt(sleep=600), "grade": False}
        admission = (await client.http_client.post("/rollout", json=body)).json()
        said.append(await refusal(client))
        with logged(said):
            await trio.sleep(200)
        lease = {"X-Osmosis-Rollout-Lease": admission["polling_lease_token"]}
        result = (await client.http_client.get("/rollout/a/result", headers=lease)).json()
        assert result["err_category"] == "lease_expired"
        said.append(result["err_message"])
        await client.run_rollout(prompt(), CHAT_URL, "untold", label="42")
        with pytest.raises(TrajectoryUnavailableError) as caught:
            await client.fetch_trajectory("untold")
        said.append(str(caught.value))
    async with in_process(make_app(api_key="k")) as client:
        said.append(await refusal(client))
    full = make_app(local_backend(max_concurrent=1, max_queue_depth=1))
    async with in_process(full, admission_timeout_sec=10) as client:
        for name in ("first", "second"):
            await client.run_rollout_async(prompt(sleep=600), CHAT_URL, name, label="42")
        said.append(await refusal(client))
        await client.cancel_rollouts(all=True)
    return [*said, *(await forgotten())]


async def forgotten() -> list[str]:
    """What a client says once another process answers."""
    first, second = make_app(), make_app()
    async with first.serving(), second.serving():
        transport = httpx.ASGITransport(app=first)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport) as http:
            try:
                async with RolloutClient(url="http://test", http_client=http, feed=False) as client:
                    await client.run_rollout_async(
                        **{**REQUEST, "initial_messages": prompt(sleep=600)}
                    )
                    transport.app = second  # type: ignore[assignment]
            except ExceptionGroup as group:
                (lost,) = group.exceptions
                return [f"ExceptionGroup: {group}", str(lost)]
    raise AssertionError("the lost rollout was not noticed")


async def over_sockets(folder: Any) -> list[str]:
    """What needs real sockets, threads or files."""
    said: list[str] = []
    blocked = threading.Event()

    class Blocks(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            assert blocked.wait(30)  # blocks the loop, until the watchdog has said so
            return ctx.prompt

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has been blocked" in record.getMessage():
                blocked.set()

    watchdog = logging.getLogger("rollout.server.watchdog")
    handler = Watch()
    watchdog.addHandler(handler)
    try:
        with logged(said):
            (folder / "file").write_text("in the way")
            backend = LocalBackend(workflow=Blocks, artifact_root=folder / "file")
            async with served(make_app(backend, watchdog_sec=0.05)) as url:
                async with RolloutClient(url=url) as client:
                    await client.run_rollout(**REQUEST, grade=False)
            solve = defined_by(find(README, "class Solve"))["Solve"]
            async with served(make_app(LocalBackend(workflow=solve))) as url:
                async with RolloutClient(url=url) as client:
                    for chat_url in ("http://127.0.0.1:9/v1", f"{url}/no-endpoint"):
                        changes = {"chat_completions_url": chat_url, "rollout_id": fresh_id()}
                        result = await client.run_rollout(**{**REQUEST, **changes}, grade=False)
                        said.append(str(result.err_message))
                async with RolloutClient(url=f"{url}/elsewhere") as client:
                    said.append(await refusal(client))
                async with httpx.AsyncClient() as http:
                    answer = await http.post(f"{url}/rollout", json={})
                    said.append(f"POST /rollout answered {answer.status_code}, not 202: …")
    finally:
        watchdog.removeHandler(handler)
    async with RolloutClient(url="http://127.0.0.1:9") as client:
        said.append(f"httpx.ConnectError: {await refusal(client)}")
    outside = RolloutClient(url="http://127.0.0.1:9")
    with pytest.raises(Exception) as caught:
        await outside.run_rollout_async(**REQUEST)
    await outside.aclose()
    said.append(str(caught.value))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Exception) as caught:
            await serve(make_app(), bind=bind, handle_signals=False)
        said.append(str(caught.value).replace(bind, "127.0.0.1:8000"))
    return said


async def of_states(folder: Path) -> list[str]:
    """What states of servers come to."""
    said: list[str] = []
    path = folder / "state"
    app = make_app()
    app.registry.store = store = SQLiteStore(path)
    async with in_process(app) as client:
        body = {**REQUEST, "initial_messages": prompt(sleep=600), "grade": False}
        admission = (await client.http_client.post("/rollout", json=body)).json()
        await trio.sleep(1)
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", folder / f"killed{suffix}")
        store._writer._path = folder
        store._writer.close()
        said.append(await refusal(client, rollout_id="other"))
        said.append((await client.health())["state"]["detail"])
    async with in_process(make_app(state=folder / "killed")) as client:
        lease = {"X-Osmosis-Rollout-Lease": admission["polling_lease_token"]}
        result = (await client.http_client.get("/rollout/a/result", headers=lease)).json()
        said.append(str(result["err_message"]))
    code = "import rollout.server.state.sqlite as s; s._locked(s.Path(input())); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(f"{path}\n")
        holder.stdin.flush()
        holder.stdout.readline()
        said.append(await start_failure(path))
        holder.kill()
    path.write_bytes(b"no database" * 1000)
    said.append(await start_failure(path))
    return said


async def start_failure(state: Path) -> str:
    with pytest.raises(RolloutServerError) as caught:
        async with make_app(state=state).serving():
            pass
    return str(caught.value)


async def of_pools() -> list[str]:
    """What workers come to."""
    worker: Any = SimpleNamespace(name="3")
    lost = Attempt(worker=worker, confirmed=True, given_up="killed by SIGKILL")
    verdict = judge(lost, None, None, cancelled=False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RolloutServerError) as caught:
        patch.setattr("rollout.pool.local.FAILED_STARTS", 1)
        async with PoolBackend(LocalWorkers("no_such_module:app", 1)).running():
            await trio.sleep_forever()
    assert isinstance(verdict, ExecutionOutcome)
    return [str(verdict.workflow.err_message), str(caught.value)]


def under_asyncio() -> list[str]:
    """What happens to those who forget to leave asyncio."""

    async def client() -> None:
        async with RolloutClient(url="http://127.0.0.1:9"):
            pass

    async def sleep() -> None:
        await trio.sleep(1)

    said = []
    for program in (client, sleep):
        with pytest.raises(Exception) as caught:
            asyncio.run(program())
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def on_the_command_line() -> list[str]:
    done = RUNNER.invoke(cli, ["serve", "no_such_module:app"], prog_name="rollout")
    return [done.stderr.strip().removeprefix("rollout: ")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every message that the page could be about."""

    async def simulated() -> list[str]:
        return [*(await failures()), *(await refusals())]

    return [
        *trio.run(simulated, clock=MockClock(autojump_threshold=0)),
        *trio.run(over_sockets, tmp_path_factory.mktemp("trouble")),
        *trio.run(
            of_states, tmp_path_factory.mktemp("states"), clock=MockClock(autojump_threshold=0)
        ),
        *trio.run(of_pools),
        *under_asyncio(),
        *on_the_command_line(),
    ]


def test_there_are_messages_to_look_at():
    assert len(PHRASES) > 20


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_message_is_a_real_one(said, phrase):
    pattern = ".*".join(map(re.escape, phrase.split("…")))
    assert [message for message in said if re.fullmatch(pattern, " ".join(message.split()))]
