"""What metrics and traces cost: agents of four model calls, 256 in flight, with and without.

    python benchmarks/telemetry_cost.py

A child process is the endpoint, one is the receiver of OTLP, and one for each way serves and asks.
They take turns, round by round; a figure is the processor time of the latter for a rollout, and its
share of what it is without in the same round. Nothing is asserted.

``without``
    Nothing is counted, and nothing makes spans.
``metrics``
    What a server counts, and a scrape of ``GET /metrics`` each second.
``traces``
    That as well, and spans with the SDK, in batches over OTLP. Needs opentelemetry-sdk and
    opentelemetry-exporter-otlp-proto-http.
``sampled``
    The same with one trace in ten.
``sdk``
    No rollout at all: the SDK makes and sends as many spans with as many attributes, in a loop.
    Its share of ``without`` is what no library can save that has them made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
    RolloutInitRequest,
)
from rollout.client import RolloutClient
from rollout.integrations.chat import chat, share_connections
from rollout.server import create_rollout_server, serve
from rollout.server.entry import Entry

ENDPOINT = Path(__file__).parent / "comparison" / "endpoint.py"
WAYS = ("without", "metrics", "traces", "sampled", "sdk")
CALLS = 4
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]
SCRAPE_SEC = 1.0


class Agent(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> None:
        history = list(ctx.prompt)
        for _ in range(CALLS):
            reply = await chat(history, model="policy")
            history += [reply.message, {"role": "user", "content": "And again?"}]


class Reward(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0)


# --- a child that serves and asks -------------------------------------------------------------


def set_up(way: str, receiver: str) -> None:
    if way == "without":
        Entry._count = lambda _: None  # type: ignore[method-assign] # noqa: SLF001
    if way not in {"traces", "sampled", "sdk"}:
        return
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    sampler = ParentBased(TraceIdRatioBased(0.1 if way == "sampled" else 1.0))
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=receiver)))
    trace.set_tracer_provider(provider)


def make_spans() -> None:
    """Have the SDK make the spans of a rollout: itself, three phases, and its calls."""
    from opentelemetry import trace

    tracer = trace.get_tracer("sdk")
    rollout = tracer.start_span("invoke_agent a", attributes=dict.fromkeys("abcd", "text"))
    below = trace.set_span_in_context(rollout)
    for phase in ("queued", "running", "grading"):
        tracer.start_span(phase, below).end()
    for _ in range(CALLS):
        tracer.start_span("chat policy", below, attributes=dict.fromkeys("abcdefghi", "text")).end()
    rollout.add_event("gen_ai.evaluation.result", {"name": "reward", "score": 1.0})
    rollout.end()


def run_sdk(rollouts: int) -> None:
    for _ in sys.stdin:
        began = time.process_time()
        for _ in range(rollouts):
            make_spans()
            time.sleep(0.001)  # the exporter has a thread, and a bounded queue
        print((time.process_time() - began) / rollouts * 1e3, flush=True)


async def scrape(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        while True:
            (await http.get("/metrics")).raise_for_status()
            await trio.sleep(SCRAPE_SEC)


async def ask(client: RolloutClient, chat_url: str, name: str, count: int, in_flight: int) -> None:
    requests = (
        RolloutInitRequest(
            rollout_id=f"{name}-{number}",
            initial_messages=PROMPT,
            chat_completions_url=chat_url,
            label="42",
        )
        for number in range(count)
    )
    async with client.run_rollouts(requests, max_in_flight=in_flight) as finished:
        async for ended in finished:
            if not ended.succeeded:
                raise SystemExit(f"a rollout failed: {ended.outcome}")


async def run_child(way: str, chat_url: str, rollouts: int, in_flight: int) -> None:
    config = AgentWorkflowConfig(name="a", concurrency=ConcurrencyConfig(max_concurrent=in_flight))
    backend = LocalBackend(
        workflow=Agent, workflow_config=config, grader=Reward, artifact_root=False
    )
    app = create_rollout_server(backend=backend, lifespan=share_connections, watchdog_sec=None)
    async with trio.open_nursery() as nursery:
        run = partial(serve, app, bind="127.0.0.1:0", handle_signals=False)
        (url,) = await nursery.start(run)
        async with RolloutClient(url=url) as client:
            await ask(client, chat_url, "warm-up", in_flight, in_flight)
            if way != "without":
                nursery.start_soon(scrape, url)
            while turn := await trio.to_thread.run_sync(sys.stdin.readline):
                began = time.process_time()
                await ask(client, chat_url, f"turn-{turn.strip()}", rollouts, in_flight)
                print((time.process_time() - began) / rollouts * 1e3, flush=True)
        nursery.cancel_scope.cancel()


def receive() -> None:
    """Take what comes, and throw it away."""

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        print(f"http://127.0.0.1:{server.server_port}/v1/traces", flush=True)
        server.serve_forever()


# --- the parent -------------------------------------------------------------------------------


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a child has ended")
    return line


def take_turns(options: argparse.Namespace) -> list[dict[str, float]]:
    with ExitStack() as stack:
        endpoint = read_line(stack.enter_context(child(str(ENDPOINT))))
        receiver = read_line(stack.enter_context(child(__file__, "--child", "receiver")))
        url = f"{endpoint}/short/{options.latency_sec}/v1"
        size = (f"--rollouts={options.rollouts}", f"--in-flight={options.in_flight}")
        urls = (f"--chat-url={url}", f"--receiver={receiver}")
        children = {
            way: stack.enter_context(child(__file__, "--child", way, *size, *urls))
            for way in options.ways
        }
        rounds = []
        for number in range(options.rounds):
            order = options.ways if number % 2 == 0 else options.ways[::-1]
            spent = {}
            for way in order:
                pipe = children[way].stdin
                assert pipe is not None
                pipe.write(f"{number}\n")
                pipe.flush()
                spent[way] = float(read_line(children[way]))
            rounds.append(spent)
            print("  ".join(f"{way} {each:.2f}" for way, each in spent.items()), flush=True)
        return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--latency-sec", type=float, default=0.2)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    for hidden in ("--child", "--chat-url", "--receiver"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "receiver":
        receive()
    elif options.child is not None:
        set_up(options.child, options.receiver)
        if options.child == "sdk":
            run_sdk(options.rollouts)
            return
        trio.run(run_child, options.child, options.chat_url, options.rollouts, options.in_flight)
    else:
        rounds = take_turns(options)
        first = options.ways[0]
        print(f"{'one rollout':12} {'processor ms':>12} {'of ' + first:>12}")
        for way in options.ways:
            spent = median(each[way] for each in rounds)
            base = 0 if way == "sdk" else 1
            shares = sorted(each[way] / each[first] - base for each in rounds)
            print(f"{way:12} {spent:12.2f} {median(shares):+12.1%}", flush=True)


if __name__ == "__main__":
    main()
