"""A model endpoint that costs little processor time. Standard library only.

``python endpoint.py`` prints its URL and serves until it is killed. The path says what it answers,
and after how long: ``/SHAPE/SECONDS/v1/chat/completions``, with a shape of `ANSWERS`,
or ``pieces`` for a stream that comes piece by piece.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
TOKENS = 400


def completion(text: str, choice: dict[str, Any] | None = None, **more: Any) -> bytes:
    message = {"role": "assistant", "content": text}
    first = {"index": 0, "message": message, "finish_reason": "stop", **(choice or {})}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy"}
    return json.dumps({**head, "choices": [first], "usage": USAGE, **more}).encode()


def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def stream(tokens: int) -> list[bytes]:
    pieces = [event({"content": f"word{number} "}) for number in range(tokens)]
    first = event({"role": "assistant", "content": ""})
    return [first, *pieces, event({}, "stop"), b"data: [DONE]\n\n"]


def logprobs(most: int) -> dict[str, Any]:
    others = [{"token": f"o{n}", "logprob": -n, "bytes": [111, 48 + n]} for n in range(1, most)]
    tokens = [
        {"token": f"t{n}", "logprob": -0.1, "bytes": [116, 48], "top_logprobs": others}
        for n in range(TOKENS)
    ]
    return {"content": tokens, "refusal": None}


IDS = {"token_ids": list(range(TOKENS))}
PROMPT_IDS = {"prompt_token_ids": list(range(10 * TOKENS))}
ANSWERS = {
    "short": completion("6 * 7 = 42"),
    "long": completion("word " * TOKENS),
    "ids": completion("word " * TOKENS, IDS, **PROMPT_IDS),
    "logprobs": completion("word " * TOKENS, IDS | {"logprobs": logprobs(5)}, **PROMPT_IDS),
    "tokens": completion("word " * TOKENS, IDS | {"logprobs": logprobs(2)}, **PROMPT_IDS),
    "stream": b"".join(stream(TOKENS)),
}
PIECES = stream(20)
"""What the shape ``pieces`` answers, a piece at a time."""
PIECES_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").lower().split("\r\n")
        lengths = [line for line in lines if line.startswith("content-length:")]
        if lengths and len(body) < int(lengths[0].partition(":")[2]):
            return
        self.data = b""  # nobody sends a second request before the answer
        _, shape, delay, *_ = lines[0].split(" ")[1].split("/")
        asyncio.get_running_loop().call_later(float(delay), self.answer, shape)

    def answer(self, shape: str) -> None:
        if shape == "pieces":
            self.transport.write(PIECES_HEAD)
            self.send_piece(0)
            return
        body = ANSWERS[shape]
        kind = "text/event-stream" if shape == "stream" else "application/json"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)

    def send_piece(self, place: int) -> None:
        if self.transport.is_closing():
            return
        if place == len(PIECES):
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(b"%x\r\n%s\r\n" % (len(PIECES[place]), PIECES[place]))
        asyncio.get_running_loop().call_soon(self.send_piece, place + 1)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
