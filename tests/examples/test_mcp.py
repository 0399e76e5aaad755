"""The MCP example: tools over stdio, and no server that outlives its rollout."""

from __future__ import annotations

import json
import os
import sys
from contextlib import asynccontextmanager

import pytest
import trio
from integrations.scripted import Step, call, say, scripted_endpoint, stall
from support import fresh_id, make_app, served

from rollout import LocalBackend
from rollout.client import RolloutClient
from rollout.integrations.chat import share_connections
from rollout.types import RolloutStatus

pytest.importorskip("mcp", reason='needs pip install "trio-rollout[mcp]"')

from examples.loading import example

HANGS = """
import os, socket
from mcp.server import MCPServer

server = MCPServer("hangs")


@server.tool()
async def hang(port: int) -> str:
    import anyio

    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"%d\\n" % os.getpid())
    await anyio.sleep_forever()


@server.tool()
def block(port: int) -> str:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"%d\\n" % os.getpid())
    connection.recv(1)


server.run("stdio")
"""


@asynccontextmanager
async def client_of(module, **config):
    """Serve the workflow of the example; yields a client of the server."""
    workflow_config = module.McpConfig(name="mcp", **config)
    backend = LocalBackend(workflow=module.UseMcpTools, workflow_config=workflow_config)
    app = make_app(backend, lifespan=share_connections)
    async with served(app) as url, RolloutClient(url=url) as client:
        yield client


def ask(chat_url):
    return {
        "initial_messages": [{"role": "user", "content": "When does the ferry leave?"}],
        "chat_completions_url": chat_url,
        "rollout_id": fresh_id(),
        "grade": False,
    }


async def test_tools_come_from_the_server():
    steps = (
        call("list_notes"),
        call("read_note", name="harbour"),
        Step(calls=[("count_words", {"text": "one two three"}), ("read_note", {"name": "none"})]),
        Step(calls=[("steal", {})]),
        say("At 9 and at 14."),
    )
    module = example("mcp_tools")
    async with scripted_endpoint(*steps) as endpoint, client_of(module) as client:
        result = await client.run_rollout(**ask(endpoint.url))
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    offered = [tool["function"] for tool in endpoint.requests[0].body["tools"]]
    assert [tool["name"] for tool in offered] == ["list_notes", "read_note", "count_words"]
    assert offered[1]["description"] == "Read one note."
    assert offered[1]["parameters"]["required"] == ["name"]
    said = [m["content"] for m in result.sample.messages if m["role"] == "tool"]
    assert said[0].splitlines() == ["harbour", "weather"]
    assert said[1] == "The ferry to the island leaves at 9 and at 14."
    assert said[2] == "3"
    assert "there is no note 'none', only: harbour, weather" in said[3]
    assert "steal" in said[4]
    assert result.sample.messages[-1]["content"] == "At 9 and at 14."


async def test_the_model_may_get_arguments_wrong():
    def broken(arguments):
        function = {"name": "read_note", "arguments": arguments}
        message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        return Step(raw=json.dumps({"choices": [{"index": 0, "message": message}]}).encode())

    steps = [broken(each) for each in ('"no object"', None, "{", "[" * 100_000)]
    module = example("mcp_tools")
    async with scripted_endpoint(*steps, say("Sorry.")) as endpoint, client_of(module) as client:
        result = await client.run_rollout(**ask(endpoint.url))
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    said = [each["content"] for each in result.sample.messages if each["role"] == "tool"]
    assert said == ["error: the arguments are no JSON object"] * 4


@pytest.mark.parametrize("tool", ["hang", "block"])
async def test_cancelling_in_mid_call_ends_the_server(tool, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    module = example("mcp_tools")
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    async with (
        listener,
        scripted_endpoint(call(tool, port=port)) as endpoint,
        client_of(module, server=str(script)) as client,
    ):
        handle = await client.run_rollout_async(**ask(endpoint.url))
        async with await listener.accept() as process:
            pid = int(await process.receive_some())
            await client.cancel_rollout(handle.rollout_id)
            result = await handle
            assert await process.receive_some() == b"", "the server's process has ended"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        health = await client.health()
    assert result.status is RolloutStatus.CANCELLED
    assert health["lifecycle"]["active_rollouts"] == 0


async def test_a_cancelled_call_leaves_a_client_usable(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    module = example("mcp_tools")
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    server = module.StdioServerParameters(command=sys.executable, args=[str(script)])
    async with listener, module.Client(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "hang", {"port": port})
        async with await listener.accept() as process:
            assert await process.receive_some()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == ["hang", "block"]


async def test_cancelling_while_the_model_answers_ends_the_server(tmp_path):
    module = example("mcp_tools")
    async with scripted_endpoint(stall()) as endpoint, client_of(module) as client:
        handle = await client.run_rollout_async(**ask(endpoint.url))
        request = await endpoint.received()
        await request.stalled.wait()
        await client.cancel_rollout(handle.rollout_id)
        result = await handle
        await request.gone.wait()
    assert result.status is RolloutStatus.CANCELLED
