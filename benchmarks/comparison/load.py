"""Calls of a model endpoint, made as cheaply as possible. Standard library only.

It speaks in lines of JSON. A job names a URL, keys that take turns, a body, and how many calls to
make with how many in flight; the answer has the seconds of all of them and of each. Every answer
must be whole and a success, or the process ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit


class Caller(asyncio.Protocol):
    """A connection that makes one call after the other."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.next()

    def next(self) -> None:
        self.data = b""
        if not self.load.left:
            self.transport.close()
            return
        self.load.left -= 1
        self.began = time.perf_counter()
        self.transport.write(next(self.load.requests))

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if found and is_whole(head.lower(), body):
            self.load.latencies.append(time.perf_counter() - self.began)
            if not head.startswith(b"HTTP/1.1 200 ") or self.load.mark not in body:
                self.closed.set_exception(ValueError(f"no success: {self.data.decode()}"))
                self.transport.close()
                return
            self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():
            return
        if exc is not None or self.data:
            self.closed.set_exception(exc or ValueError(f"cut off: {self.data.decode()}"))
        else:
            self.closed.set_result(None)


def is_whole(head: bytes, body: bytes) -> bool:
    if b"\r\ntransfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
    return len(body) >= int(length)


class Load:
    """One job."""

    def __init__(self, job: dict[str, Any]) -> None:
        url, body = urlsplit(job["url"]), json.dumps(job["body"])
        self.host, self.port = url.hostname, url.port
        self.left = job["calls"]
        self.in_flight = min(job["in_flight"], self.left)
        self.mark = b"[DONE]" if job["body"].get("stream") else b'"choices"'
        self.latencies: list[float] = []
        self.requests = cycle(
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            for key in job["keys"]
        )

    async def run(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        callers = [
            (await loop.create_connection(lambda: Caller(self), self.host, self.port))[1]
            for _ in range(self.in_flight)
        ]
        await asyncio.gather(*(caller.closed for caller in callers))
        return {"took_sec": time.perf_counter() - began, "latencies_sec": sorted(self.latencies)}


print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps(asyncio.run(Load(json.loads(line)).run())), flush=True)
