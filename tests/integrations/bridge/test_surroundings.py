"""What else lives in the process: servers, child processes, other loops, signals, debug mode."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import trio
from support import CHAT_URL, fresh_id, in_process, local_backend, make_app, prompt, served

from rollout import AgentWorkflow, get_rollout_context
from rollout.client import RolloutClient
from rollout.integrations.asyncio_bridge import get_bridge, open_asyncio_bridge, run_in_trio


async def test_child_processes_work_from_the_bridges_loop():
    async def child():
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; print(sys.stdin.read().upper()); sys.exit(3)",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate(b"hello")
        return out.strip(), process.returncode

    async with open_asyncio_bridge() as bridge:
        assert await bridge.run(child) == (b"HELLO", 3)


async def test_a_cancelled_child_process_can_be_ended_in_the_cleanup():
    started = trio.Event()
    codes = []

    async def child(bridge):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE
        )
        try:
            bridge.call_trio_soon(started.set)
            await process.wait()
        finally:
            process.kill()
            codes.append(await process.wait())

    scope = trio.CancelScope()

    async def caller(bridge):
        with scope:
            await bridge.run(child, bridge)

    async with open_asyncio_bridge() as bridge:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller, bridge)
            await started.wait()
            scope.cancel()
    assert scope.cancelled_caught
    assert codes == [-signal.SIGKILL]


async def test_sockets_between_both_sides():
    async def serve(ready, requests):
        async def answer(reader, writer):
            writer.write((await reader.readline()).upper())
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await run_in_trio(ready.send, port)
            await server.serve_forever()

    send, receive = trio.open_memory_channel(0)
    async with open_asyncio_bridge() as bridge:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bridge.run, serve, send, 1)
                stream = await trio.open_tcp_stream("127.0.0.1", await receive.receive())
                async with stream:
                    await stream.send_all(b"hello\n")
                    received = b"".join([data async for data in stream])
                scope.cancel()
    assert received == b"HELLO\n"


async def test_asyncio_in_other_threads_and_signals_are_left_alone():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def elsewhere():
        return asyncio.run(asyncio.sleep(0, "own loop"))

    async with open_asyncio_bridge() as bridge:
        assert await bridge.run(asyncio.sleep, 0, "bridge") == "bridge"
        assert await trio.to_thread.run_sync(elsewhere) == "own loop"
        # An asyncio.run inside of the bridge, in a worker thread, as some sync tools do.
        assert await bridge.run(asyncio.to_thread, elsewhere) == "own loop"
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert await trio.to_thread.run_sync(elsewhere) == "own loop"


def test_the_main_threads_policy_and_loop_stay_as_they_were():
    if sys.version_info >= (3, 14):
        pytest.skip("policies are on their way out")
    policy = asyncio.get_event_loop_policy()

    async def main():
        async with open_asyncio_bridge() as bridge:
            await bridge.run(asyncio.sleep, 0)

    trio.run(main)
    assert asyncio.get_event_loop_policy() is policy
    assert asyncio.run(asyncio.sleep(0, "fine")) == "fine"


async def test_debug_mode_reports_slow_callbacks_through_logging(caplog, capsys):
    async def slow():
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 1e-9
        await asyncio.sleep(0)
        return loop.get_debug()

    with caplog.at_level(logging.WARNING, logger="asyncio"):
        async with open_asyncio_bridge(debug=True) as bridge:
            assert await bridge.run(slow) is True
            with trio.move_on_after(0):
                await bridge.run(asyncio.sleep, 3600)
    assert "Executing" in caplog.text
    assert capsys.readouterr() == ("", "")


async def test_errors_of_loop_callbacks_are_logged(caplog):
    def fail():
        raise OSError("callback failed")

    async def schedule():
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async with open_asyncio_bridge() as bridge:
        await bridge.run(schedule)
    [record] = caplog.records
    assert record.name == "rollout.integrations.asyncio_bridge"
    assert str(record.exc_info[1]) == "callback failed"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_an_eager_task_factory_changes_nothing():
    async def set_factory():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)

    async def work():
        return await asyncio.gather(asyncio.sleep(0, 1), run_in_trio(trio.sleep, 0))

    async with open_asyncio_bridge() as bridge:
        await bridge.run(set_factory)
        assert await bridge.run(work) == [1, None]


# --- in a rollout server --------------------------------------------------------------------


async def framework(rollout_id):
    await asyncio.sleep(0)
    assert get_rollout_context().rollout_id == rollout_id
    return await run_in_trio(tool)


async def tool():
    await trio.lowlevel.checkpoint()
    return get_rollout_context().rollout_id


class Framework(AgentWorkflow):
    """Does its work behind the bridge of the server; ``sleep`` never ends by itself."""

    cleaned_up: ClassVar[list[str]] = []

    async def run(self, ctx):
        rollout_id = get_rollout_context().rollout_id
        if "sleep" in ctx.prompt[0]:
            await get_bridge().run(self.hang, rollout_id)
        answer = await get_bridge().run(framework, rollout_id)
        return [*ctx.prompt, {"role": "assistant", "content": answer}]

    async def hang(self, rollout_id):
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaned_up.append(rollout_id)


@asynccontextmanager
async def lifespan(app):
    async with open_asyncio_bridge():
        yield


async def test_workflows_of_a_server_share_the_bridge_of_its_lifespan():
    app = make_app(local_backend(Framework, None), lifespan=lifespan)
    rollout_ids = [fresh_id() for _ in range(10)]
    answers = {}

    async def run(client, rollout_id):
        result = await client.run_rollout(
            initial_messages=prompt(),
            chat_completions_url=CHAT_URL,
            rollout_id=rollout_id,
            grade=False,
        )
        answers[rollout_id] = result.sample.messages[-1]["content"]

    async with served(app) as url, RolloutClient(url=url) as client:
        async with trio.open_nursery() as nursery:
            for rollout_id in rollout_ids:
                nursery.start_soon(run, client, rollout_id)
    assert answers == {rollout_id: rollout_id for rollout_id in rollout_ids}


async def test_an_agent_timeout_reaches_the_asyncio_task():
    app = make_app(local_backend(Framework, None), lifespan=lifespan)
    rollout_id = fresh_id()
    async with served(app) as url, RolloutClient(url=url) as client:
        result = await client.run_rollout(
            initial_messages=prompt(sleep=1),
            chat_completions_url=CHAT_URL,
            rollout_id=rollout_id,
            grade=False,
            agent_timeout_sec=0.2,
        )
    assert (result.status, result.err_category) == ("failure", "timeout")
    assert rollout_id in Framework.cleaned_up


async def test_without_a_bridge_the_rollout_says_what_is_missing():
    async with in_process(make_app(local_backend(Framework, None))) as client:
        result = await client.run_rollout(
            initial_messages=prompt(),
            chat_completions_url=CHAT_URL,
            rollout_id=fresh_id(),
            grade=False,
        )
    assert result.status == "failure"
    assert "open_asyncio_bridge" in result.err_message
