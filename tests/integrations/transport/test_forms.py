"""What endpoints send, in forms that are less usual."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pytest
import trio
from integrations.scripted import Step, refuse, say, scripted_endpoint

from rollout import RolloutContext
from rollout.integrations.chat import share_connections
from rollout.integrations.recording.calls import load, read_body
from rollout.integrations.recording.recorder import ConversationRecorder, recorder_of
from rollout.integrations.recording.responses import input_as_messages, items_as_messages
from rollout.integrations.recording.streams import StreamedAnswer
from rollout.integrations.transport.recording import Endpoint, ReadAlong, RecordingTransport

QUESTION = {"role": "user", "content": "What is 6 + 7?"}
CHUNK = {"choices": [{"index": 0, "delta": {"content": "13"}, "finish_reason": "stop"}]}


async def posted(step, body, *, route="/chat/completions"):
    """What a caller over httpx gets, and the recorder of its rollout."""
    async with scripted_endpoint(step) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key="key-of-it") as rollout:
            recorder = recorder_of(rollout, ConversationRecorder)
            transport = RecordingTransport(
                Endpoint.of(endpoint.url, "key-of-it"), recorder, conversation="main"
            )
            assert "key-of-it" not in repr(transport) + repr(transport.endpoint)
            async with httpx.AsyncClient(transport=transport) as http:
                response = await http.post(endpoint.url + route, json=body)
    return response, recorder, endpoint.requests[0]


def stream(data, **headers):
    return Step(raw=data, headers={"content-type": "text/event-stream", **headers})


STREAMED = {"model": "policy", "messages": [QUESTION], "stream": True}


async def test_a_stream_without_its_last_line_break_and_mark():
    data = f"data: {json.dumps(CHUNK)}".encode()
    response, recorder, _ = await posted(stream(data), STREAMED)
    assert response.content == data
    assert recorder.messages[-1] == {"role": "assistant", "content": "13"}
    assert recorder.calls[0].outcome == "complete"


async def test_a_stream_that_is_compressed_all_the_same():
    data = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode()
    step = stream(gzip.compress(data), **{"content-encoding": "gzip"})
    response, recorder, request = await posted(step, STREAMED)
    assert request.headers["accept-encoding"] == "identity"
    assert response.content == data
    assert recorder.messages[-1]["content"] == "13"


async def test_a_whole_answer_in_place_of_a_stream():
    body = {"choices": [{"message": {"content": "13"}, "finish_reason": "stop"}]}
    _, recorder, _ = await posted(Step(raw=json.dumps(body).encode()), STREAMED)
    assert recorder.messages[-1] == {"role": "assistant", "content": "13"}


@pytest.mark.parametrize("kind", ["text/plain; charset=utf-8", "application/json", ""])
async def test_a_stream_that_is_called_something_else(kind):
    """What the caller has not asked for stays hidden in it."""
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    events = [f"data: {json.dumps(each)}\n\n".encode() for each in (CHUNK, usage)]
    data = b"".join([b"\n", *events, b"data: [DONE]\n\n"])
    step = Step(raw=data, headers={"content-type": kind})
    response, recorder, _ = await posted(step, STREAMED)
    assert response.content == b"\n" + events[0]
    assert recorder.messages[-1] == {"role": "assistant", "content": "13"}
    assert recorder.calls[0].usage == {"completion_tokens": 1}


async def test_a_stream_of_nothing_but_its_mark():
    response, recorder, _ = await posted(stream(b"data: [DONE]\n\n"), STREAMED)
    assert response.content == b""
    (recorded,) = recorder.calls
    assert (recorded.outcome, recorded.choices) == ("failed", [])
    assert recorded.error == "the stream ended before its answer was whole"


async def test_nothing_in_place_of_a_stream():
    response, recorder, _ = await posted(Step(raw=b" \n"), STREAMED)
    assert response.content == b" \n"
    assert recorder.calls[0].error == "the answer is not a JSON object"


async def test_comments_and_other_events_pass():
    data = f": still here\n\nevent: ping\ndata: {{}}\n\ndata: {json.dumps(CHUNK)}\n\n".encode()
    response, recorder, _ = await posted(stream(data), STREAMED)
    assert response.content == data
    assert recorder.messages[-1]["content"] == "13"


async def test_an_error_whose_body_cannot_be_decompressed():
    async with scripted_endpoint(
        Step(raw=b"no gzip", status=500, headers={"content-encoding": "gzip"})
    ) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url) as rollout:
            recorder = recorder_of(rollout, ConversationRecorder)
            transport = RecordingTransport(
                Endpoint.of(endpoint.url, None), recorder, conversation="main"
            )
            async with httpx.AsyncClient(transport=transport) as http:
                async with http.stream(
                    "POST", f"{endpoint.url}/chat/completions", json={"messages": []}
                ) as response:
                    assert [raw async for raw in response.aiter_raw()] == [b"no gzip"]
    assert recorder.calls[0].error == "HTTP 500"


class Sent(httpx.AsyncByteStream):
    """A body of pieces, and then of nothing for ever."""

    def __init__(self, *pieces):
        self.pieces = list(pieces)
        self.waiting = trio.Event()
        self.closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await trio.lowlevel.checkpoint()
        if not self.pieces:
            self.waiting.set()
            await trio.sleep_forever()
        return self.pieces.pop(0)

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        self.closed = True


async def left_unread(monkeypatch, body, status=429):
    """Leave an answer unread; return the record of its call."""
    with RolloutContext(chat_completions_url="http://h/v1") as rollout:
        recorder = recorder_of(rollout, ConversationRecorder)
        transport = RecordingTransport(Endpoint.of("http://h/v1", None), recorder, conversation="m")

        async def send(request):
            await trio.lowlevel.checkpoint()
            return httpx.Response(status, stream=body, request=request)

        monkeypatch.setattr(transport, "send", send)
        async with httpx.AsyncClient(transport=transport) as http:
            async with http.stream("POST", "http://h/v1/chat/completions", json={}):
                pass
    (recorded,) = recorder.calls
    return recorded


async def test_a_refusal_that_nobody_reads_is_recorded_and_its_connection_kept(monkeypatch):
    monkeypatch.setattr(ReadAlong, "rest_sec", 20.0)
    async with scripted_endpoint(refuse(429, "slow down")) as endpoint, share_connections():
        with RolloutContext(chat_completions_url=endpoint.url) as rollout:
            recorder = recorder_of(rollout, ConversationRecorder)
            transport = RecordingTransport(
                Endpoint.of(endpoint.url, None), recorder, conversation="main"
            )
            async with httpx.AsyncClient(transport=transport) as http:
                for _ in range(3):
                    url = f"{endpoint.url}/chat/completions"
                    async with http.stream("POST", url, json={"messages": []}) as response:
                        assert response.status_code == 429
        assert endpoint.connections == 1
    assert [each.error for each in recorder.calls] == ["HTTP 429: slow down"] * 3


async def test_a_refusal_that_never_ends_is_left_soon(monkeypatch, autojump_clock):
    body = Sent(b'{"error": "slow')
    began = trio.current_time()
    recorded = await left_unread(monkeypatch, body)
    assert trio.current_time() - began == pytest.approx(ReadAlong.rest_sec)
    assert (recorded.outcome, recorded.error, body.closed) == ("failed", "HTTP 429", True)


async def test_a_refusal_is_read_no_further_than_a_message_takes(monkeypatch):
    body = Sent(*[b"x" * 30_000] * 100)
    recorded = await left_unread(monkeypatch, body)
    assert len(body.pieces) == 97
    assert (recorded.outcome, recorded.error, body.closed) == ("failed", "HTTP 429", True)


async def test_a_refusal_that_breaks_off_is_one_all_the_same(monkeypatch):
    class Broken(Sent):
        async def __anext__(self):
            await trio.lowlevel.checkpoint()
            raise httpx.ReadError("gone")

    body = Broken()
    recorded = await left_unread(monkeypatch, body)
    assert (recorded.outcome, recorded.error, body.closed) == ("failed", "HTTP 429", True)


async def test_a_refusal_does_not_hold_a_cancellation_up(monkeypatch, autojump_clock):
    body = Sent(b'{"error": "slow down"}')
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left_unread, monkeypatch, body)
        with trio.fail_after(60):
            await body.waiting.wait()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == began
    assert body.closed


async def test_an_answer_that_nobody_reads_is_not_waited_for(monkeypatch, autojump_clock):
    body = Sent(b"{")
    began = trio.current_time()
    recorded = await left_unread(monkeypatch, body, status=200)
    assert (recorded.outcome, body.closed, len(body.pieces)) == ("interrupted", True, 1)
    assert trio.current_time() == began


async def test_a_compressed_stream_that_is_left_keeps_what_it_has_said(monkeypatch, autojump_clock):
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(f"data: {json.dumps(CHUNK)}\n\n".encode())
    body = Sent(data + packer.flush(zlib.Z_SYNC_FLUSH))
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    with RolloutContext(chat_completions_url="http://h/v1") as rollout:
        recorder = recorder_of(rollout, ConversationRecorder)
        transport = RecordingTransport(Endpoint.of("http://h/v1", None), recorder, conversation="m")

        async def send(request):
            await trio.lowlevel.checkpoint()
            return httpx.Response(200, headers=headers, stream=body, request=request)

        monkeypatch.setattr(transport, "send", send)
        async with httpx.AsyncClient(transport=transport) as http:
            with trio.move_on_after(1):
                await http.post("http://h/v1/chat/completions", json=STREAMED)
    assert recorder.messages[-1]["content"] == "13"
    assert recorder.calls[0].status_code == 200
    assert body.closed


async def test_calls_that_are_no_calls_of_the_model_pass_unrecorded():
    response, recorder, _ = await posted(say("x"), {"messages": [], "input": "x"}, route="/other")
    assert response.status_code == 200
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({"status": "failed", "error": {"message": "out of memory"}}, "out of memory"),
        ({"status": "cancelled", "error": None}, "the response is cancelled"),
        ({"status": "completed", "output": []}, "the answer has no choices"),
    ],
)
def test_responses_that_have_failed(body, outcome):
    answer = read_body(load(json.dumps(body)), "responses")
    assert (answer.error, answer.choices) == (outcome, [])


def test_responses_that_are_not_all_there():
    part = {"type": "output_text", "text": "It is", "logprobs": [{"token": "It", "logprob": -1.0}]}
    body = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [{"type": "message", "role": "assistant", "content": [part]}],
    }
    (choice,) = read_body(load(json.dumps(body)), "responses").choices
    assert choice.finish_reason == "max_output_tokens"
    assert choice.logprobs == {"content": [{"token": "It", "logprob": -1.0}]}
    assert not read_body({"status": "queued", "output": [{}]}, "responses").complete


def test_a_stream_of_a_response_that_breaks_off_keeps_its_items():
    streamed = StreamedAnswer("responses")
    for event in (
        {"type": "response.created", "response": {"id": "r1", "model": "m", "output": []}},
        {
            "type": "response.output_item.done",
            "item": {"type": "message", "role": "assistant", "content": "13"},
        },
    ):
        streamed.add(f"data: {json.dumps(event)}\n\n".encode())
    answer = streamed.answer()
    assert (answer.complete, answer.error, answer.response_id) == (False, None, "r1")
    assert answer.choices[0].messages == [{"role": "assistant", "content": "13"}]
    streamed.add(b'data: {"type": "error", "message": "overloaded"}\n\n')
    assert streamed.answer().error == "overloaded"


def test_items_of_all_kinds():
    image = "https://host.invalid/a.png"
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "image_url": image},
                {"type": "input_file", "file_id": "f1"},
            ],
        },
        {"type": "reasoning", "summary": [{"text": "Hm."}], "content": [{"text": "A cat?"}]},
        {"type": "reasoning", "summary": [{"text": "A dog."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "dog"}],
        },
        {"type": "custom_tool_call", "call_id": "c1", "name": "look", "input": {"at": "it"}},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "brown"}]},
        {"type": "web_search_call", "id": "w1", "status": "completed"},
    ]  # fmt: skip
    assert items_as_messages(items) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it?"},
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "input_file", "file_id": "f1"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "A"},
                {"type": "refusal", "refusal": "No."},
                {"type": "text", "text": "dog"},
            ],
            "reasoning_content": "Hm.\n\nA cat?\n\nA dog.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "it"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "brown"},
        items[-1],
    ]
    assert input_as_messages({"input": 3}) == []


def test_what_is_shown_of_an_endpoint_has_no_password():
    endpoint = Endpoint.of("http://name:word@h:9/v1/chat/completions?a=1", "key")
    transport = RecordingTransport(endpoint, None, conversation="main")
    assert repr(endpoint) == "<Endpoint http://h:9/v1>"
    assert repr(transport) == "<RecordingTransport to http://h:9/v1>"
    assert endpoint.has(httpx.URL("http://name:word@h:9/v1/models"))


def test_half_of_a_surrogate_pair_is_read():
    """Which the quicker of two readers of JSON refuses."""
    body = b'{"choices": [{"message": {"content": "13\\ud83d"}, "finish_reason": "length"}]}'
    answer = read_body(load(body), "chat")
    assert answer.error is None
    assert answer.choices[0].messages[0]["content"] == "13\ud83d"
