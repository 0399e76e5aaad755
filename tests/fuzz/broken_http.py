"""Broken HTTP: requests to a rollout server, most of them damaged in one or a few places.

Input *n* of a seed is always the same bytes, cut into the same pieces.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from attrs import frozen

__all__ = ["Input", "make_input"]

_POSTS = {
    b"/rollout": {
        "rollout_id": "fuzz",
        "initial_messages": [{"role": "user", "content": "6 * 7?"}],
        "chat_completions_url": "http://127.0.0.1:9/v1",
        "label": "42",
    },
    b"/rollouts": {"rollouts": []},
    b"/rollout/cancel": {"ids": ["nobody"]},
    b"/rollouts/feed": {"leases": []},
    b"/rollouts/renew": {"feed": "unknown"},
}
_GETS = [b"/health", b"/openapi.json", b"/rollout/fuzz/result", b"/no/such/path", b"/"]
_TARGETS = [
    b"*",
    b"//",
    b"/%ff",
    b"/rollout/%2e%2e/result",
    b"http://x/health",
    b"/a b",
    b"\xff",
    b"",
]
_METHODS = [b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"G\0T", b""]
_VERSIONS = [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP", b"http/1.1", b""]
_LENGTHS = [
    b"0", b"1", b"1048577", b"99999999999999999999", b"-1", b"+1", b"1, 1", b"0x10", b" ",
    b"9" * 30,
]  # fmt: skip
_HEADERS = [
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, chunked",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: keep-alive, Upgrade",
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Host: twice",
    b"Authorization: Bearer wrong",
    b"Authorization: Basic eDp5",
    b"X-Osmosis-Rollout-Lease: \xff",
    b"X-Osmosis-Rollout-Lease:",
    b"X-Rollout-Seen: running;agent-started",
    b"Content-Type: text/plain",
    b'Content-Type: application/json; charset="',
    b"Content-Encoding: gzip",
    b" folded",
    b"no colon",
    b": no name",
    b"Na me: x",
    b"X: \0",
    b"X: " + b"x" * 9000,
]
_SPLICES = [
    b"\r\n", b"\n", b"\r", b"\0", b"\r\n\r\n", b"\xff\xfe", b"0\r\n\r\n", b"5\r\nhello\r\n",
    b"ffffffff\r\n", b"[" * 200, b'{"a":1,"a":2}', b"NaN", b"1e999", b'"\\ud800"', b"9" * 5000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip


@frozen
class Input:
    """One connection's worth of bytes.

    Attributes:
        pieces: What is sent, write by write.
        complete: Whether it is HTTP, so that it has to be answered.
    """

    pieces: list[bytes]
    complete: bool


def make_input(seed: int, number: int, key: str) -> Input:
    """Make input *number* of a seed; most of its requests carry the key."""
    random = Random(f"{seed}/{number}")
    kind = random.choice(["right", "body", "body", "wire", "wire"])
    requests = [_request(random, key, kind) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    data = b"".join(requests)
    if kind == "wire":
        for _ in range(random.choice([0, 0, 1, 1, 2, 4])):
            data = _damaged(random, data)
    return Input(_cut(random, data), complete=kind != "wire")


def _request(random: Random, key: str, kind: str) -> bytes:
    """Make a request that is right, wrong in its body, or maybe wrong anywhere."""
    headers = [b"Host: fuzz"]
    body = b""
    if random.random() < 0.7:
        headers.append(f"Authorization: Bearer {key}".encode())
    if random.random() < 0.5:
        method, target = b"GET", random.choice(_GETS)
        headers.append(b"X-Osmosis-Rollout-Lease: token")
    else:
        method, target = b"POST", random.choice(list(_POSTS))
        body = json.dumps(_value(random, target)).encode()
        if kind != "right" and random.random() < 0.8:
            body = _damaged(random, body)
        headers.append(b"Content-Type: application/json")
        if random.random() < 0.3:
            headers.append(b"Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            headers.append(b"Content-Length: %d" % len(body))
    version = b"HTTP/1.1"
    if kind == "wire":
        method = _maybe(random, method, _METHODS)
        target = _maybe(random, target, _TARGETS)
        version = _maybe(random, version, _VERSIONS)
        if random.random() < 0.1:
            headers.append(b"Content-Length: " + random.choice(_LENGTHS))
        headers += random.sample(_HEADERS, random.choice([0, 0, 0, 1, 2]))
        random.shuffle(headers)
    return b"\r\n".join([b" ".join([method, target, version]), *headers, b"", body])


def _value(random: Random, target: bytes) -> Any:
    value = dict(_POSTS[target])
    if target == b"/rollout":
        value["rollout_id"] = f"fuzz-{random.getrandbits(64):x}"
    return value


def _maybe(random: Random, value: bytes, others: list[bytes]) -> bytes:
    return random.choice(others) if random.random() < 0.1 else value


def _damaged(random: Random, data: bytes) -> bytes:
    start = random.randrange(len(data) + 1)
    end = min(start + random.choice([1, 1, 2, 8, 64]), len(data))
    kind = random.randrange(6)
    if kind == 0:  # cut off
        return data[:start]
    if kind == 1:  # left out
        return data[:start] + data[end:]
    if kind == 2:  # said twice
        return data[:end] + data[start:]
    if kind == 3:  # other bytes
        return data[:start] + random.randbytes(end - start) + data[end:]
    if kind == 4 and start < len(data):  # one bit
        return data[:start] + bytes([data[start] ^ 1 << random.randrange(8)]) + data[start + 1 :]
    return data[:start] + random.choice(_SPLICES) + data[start:]


def _cut(random: Random, data: bytes) -> list[bytes]:
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice([0, 0, 1, 3])))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]
