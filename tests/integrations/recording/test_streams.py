"""Streams as endpoints send them, put together event by event."""

from __future__ import annotations

import json

import pytest

from rollout.integrations.recording.calls import error_message, read_body
from rollout.integrations.recording.streams import Events, StreamedAnswer


def streamed(*events, api="chat"):
    answer = StreamedAnswer(api)
    for event in events:
        answer.add(f"data: {json.dumps(event)}\n\n".encode())
    return answer


def message(*deltas, reason="tool_calls"):
    """The message that deltas of one choice make."""
    rows = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    rows.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    answer = streamed(*rows).answer(ended=True)
    assert (answer.complete, answer.error) == (True, None)
    (choice,) = answer.choices
    (reply,) = choice.messages
    return reply


def piece(call_id=None, name=None, arguments=None, **more):
    """A piece of a call of a tool."""
    function = {"name": name, "arguments": arguments}
    call = {
        "id": call_id,
        "function": {key: value for key, value in function.items() if value is not None},
        **more,
    }
    return {"tool_calls": [{key: value for key, value in call.items() if value is not None}]}


def calls(reply):
    return [
        (each.get("id"), each["function"].get("name"), each["function"].get("arguments"))
        for each in reply["tool_calls"]
    ]


def test_a_function_call_of_the_old_kind_keeps_its_pieces():
    reply = message(
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": ""}},
        {"function_call": {"arguments": '{"left": '}},
        {"function_call": {"arguments": "6}"}},
        reason="function_call",
    )
    assert reply["function_call"] == {"name": "add", "arguments": '{"left": 6}'}


def test_speech_keeps_its_pieces():
    reply = message(
        {"audio": {"id": "a1", "transcript": "thir"}},
        {"audio": {"id": "a1", "transcript": "teen", "data": None}},
        {"audio": {"data": "UklG"}},
    )
    assert reply["audio"] == {"id": "a1", "transcript": "thirteen", "data": "UklG"}


def test_an_object_that_comes_again_is_not_put_together():
    reply = message({"content": "13", "safety": {"label": "ok"}}, {"safety": {"label": "ok"}})
    assert reply["safety"] == {"label": "ok"}


def test_calls_whose_pieces_interleave():
    reply = message(
        piece("a", "f", "", index=0),
        piece("b", "g", "", index=1),
        piece(arguments='{"x"', index=0),
        {"tool_calls": [*piece(arguments='{"y"', index=1)["tool_calls"], {"index": 0}]},
        piece(arguments=": 1}", index=0),
        piece(arguments=": 2}", index=1),
    )
    assert calls(reply) == [("a", "f", '{"x": 1}'), ("b", "g", '{"y": 2}')]


def test_calls_are_in_the_order_of_their_index():
    reply = message(piece("b", "g", "{}", index=1), piece("a", "f", "{}", index=0))
    assert [each[0] for each in calls(reply)] == ["a", "b"]


def test_whole_calls_that_all_have_the_same_index():
    reply = message(
        piece("a", "f", '{"x": 1}', index=0),
        piece("b", "f", '{"x": 2}', index=0),
        piece("c", "f", "{}", index=0),
    )
    assert calls(reply) == [("a", "f", '{"x": 1}'), ("b", "f", '{"x": 2}'), ("c", "f", "{}")]


def test_a_call_that_gets_another_id_with_each_piece_is_one_call():
    reply = message(
        piece("a", "f", "", index=0),
        piece("b", "f", '{"x"', index=0),
        piece("c", "f", ": 1}", index=0),
        piece("d", arguments="", index=0),
    )
    assert calls(reply) == [("d", "f", '{"x": 1}')]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param(
            [piece("a", "f", "", index=0), piece("b", "g", '{"p":2}', index=0)],
            [("a", "f", ""), ("b", "g", '{"p":2}')],
            id="the first without arguments",
        ),
        pytest.param(
            [piece("a", "f", "", index=0), piece("b", "f", '{"p":2}', index=0)],
            [("a", "f", ""), ("b", "f", '{"p":2}')],
            id="the first of the same name without arguments",
        ),
        pytest.param(
            [
                piece("a", "f", '{"p":1}', index=0),
                piece("b", "f", "", index=0),
                piece(arguments='{"p"', index=1),
                piece(arguments=":2}", index=1),
            ],
            [("a", "f", '{"p":1}'), ("b", "f", '{"p":2}')],
            id="arguments at another index than their call",
        ),
        pytest.param(
            [
                piece("a", "f", "", index=0),
                piece(arguments='{"p"', index=1),
                piece(arguments=":1}", index=2),
            ],
            [("a", "f", '{"p":1}')],
            id="an index for each piece",
        ),
        pytest.param(
            [
                piece("a", "f", "", index=0),
                piece("a", arguments='{"p"', index=1),
                piece("a", arguments=":1}", index=2),
                piece("b", "f", "{}", index=3),
            ],
            [("a", "f", '{"p":1}'), ("b", "f", "{}")],
            id="an index for each piece, with ids",
        ),
        pytest.param(
            [
                piece(None, "f", '{"p":1}', index=0),
                piece(None, "f", '{"p":2}', index=0),
                piece(None, "g", "", index=0),
            ],
            [(None, "f", '{"p":1}'), (None, "f", '{"p":2}'), (None, "g", "")],
            id="without ids",
        ),
        pytest.param(
            [
                piece(None, "f", "", index=0),
                piece(None, "f", '{"p"', index=0),
                piece(None, "f", ":1}", index=0),
            ],
            [(None, "f", '{"p":1}')],
            id="without ids, the name with each piece",
        ),
        pytest.param(
            [
                piece("a", "f", '{"p"', index=0),
                piece("b", "f", "", index=0),
                piece(arguments='{"p":', index=0),
                piece(arguments="2}", index=0),
                piece("c", "f", '{"p":', index=0),
            ],
            [("a", "f", '{"p"'), ("b", "f", '{"p":2}'), ("c", "f", '{"p":')],
            id="cut off",
        ),
        pytest.param(
            [piece("a", "f", {"p": 1}, index=0), piece("b", "f", {"p": 2}, index=0)],
            [("a", "f", {"p": 1}), ("b", "f", {"p": 2})],
            id="arguments that are no text",
        ),
    ],
)
def test_which_calls_there_are(pieces, expected):
    assert calls(message(*pieces)) == expected


TEXT = {"type": "text", "text": "b"}
THOUGHT = {"type": "thinking", "thinking": "Hm."}


@pytest.mark.parametrize(
    ("pieces", "content"),
    [
        (["a", [TEXT], "c"], [{"type": "text", "text": "abc"}]),
        ([[THOUGHT], "a", "c"], [THOUGHT, {"type": "text", "text": "ac"}]),
        (["a", TEXT, [THOUGHT]], [{"type": "text", "text": "ab"}, THOUGHT]),
        ([TEXT, "", "c"], [{"type": "text", "text": "bc"}]),
        (["", [THOUGHT]], [THOUGHT]),
    ],
)
def test_content_that_changes_its_form_keeps_all_its_text(pieces, content):
    reply = message(*({"content": each} for each in pieces), reason="stop")
    assert reply["content"] == content


@pytest.mark.parametrize("first_id", ["a", None])
def test_a_whole_call_that_goes_on_after_all(first_id):
    """Its arguments were an object, but so is what they are with the next piece."""
    reply = message(piece(first_id, "f", "{}", index=0), piece("a", "f", " ", index=0))
    assert calls(reply) == [("a", "f", "{} ")]


def test_calls_without_an_index():
    reply = message(
        piece("a", "f", '{"x"'),
        piece(arguments=": 1}"),
        piece("b", "g", "{"),
        piece("a", arguments=""),
        piece("b", arguments="}"),
        piece(name="h", arguments="{}"),
        piece(arguments=" "),
    )
    assert calls(reply) == [("a", "f", '{"x": 1}'), ("b", "g", "{}"), (None, "h", "{} ")]


@pytest.mark.parametrize("events", [[], [{"choices": [{"index": 0, "delta": {"content": "a"}}]}]])
def test_a_stream_that_ends_before_its_answer_has_failed(events):
    answer = streamed(*events)
    assert answer.answer().error is None  # as long as more may come
    ended = answer.answer(ended=True)
    assert (ended.complete, ended.error) == (False, "the stream ended before its answer was whole")
    assert len(ended.choices) == len(events)


def test_a_stream_that_says_why_it_ends():
    answer = streamed({"error": {"message": "overloaded"}}).answer(ended=True)
    assert answer.error == "overloaded"


def test_an_error_that_forgets_that_it_is_in_a_stream():
    answer = StreamedAnswer("chat")
    assert answer.add(b'{"error": {"message": "no GPU"}, "usage": {"prompt_tokens": 1}}') is False
    ended = answer.answer(ended=True)
    assert (ended.error, ended.usage) == ("no GPU", None)


def item(kind, **more):
    return {"type": "response.output_item.added", "item": {"type": kind, **more}}


def part(kind, text, **more):
    return {"type": f"response.{kind}.delta", "delta": text, **more}


def test_a_response_that_breaks_off_keeps_what_it_has_said():
    answer = streamed(
        {"type": "response.created", "response": {"id": "r1", "model": "m", "output": []}},
        {**item("reasoning", id="rs", summary=[]), "output_index": 0},
        part("reasoning_summary_text", "Two ", output_index=0, summary_index=0),
        part("reasoning_summary_text", "numbers.", output_index=0, summary_index=0),
        part("reasoning_summary_text", "Add.", output_index=0, summary_index=1),
        {**item("message", id="m", role="assistant", content=[]), "output_index": 1},
        part("output_text", "It ", output_index=1, content_index=0, logprobs=[{"token": "It "}]),
        part("output_text", "is", output_index=1, content_index=0, logprobs=[{"token": "is"}]),
        {**item("function_call", id="f", call_id="c1", name="add"), "output_index": 2},
        part("function_call_arguments", '{"left"', output_index=2),
        part("function_call_arguments", ": 6", output_index=2),
        {**item("message", id="m2", role="assistant", content=[]), "output_index": 3},
        api="responses",
    ).answer()
    assert (answer.complete, answer.error, answer.response_id) == (False, None, "r1")
    (choice,) = answer.choices
    function = {"name": "add", "arguments": '{"left": 6'}
    assert choice.messages == [
        {
            "role": "assistant",
            "content": "It is",
            "reasoning_content": "Two numbers.\n\nAdd.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    ]
    assert choice.logprobs == {"content": [{"token": "It "}, {"token": "is"}]}


@pytest.mark.parametrize("index", [-1, 5, 10**12, None, "0"])
def test_a_piece_of_a_part_that_there_is_not_begins_one(index):
    answer = streamed(
        item("message", id="m", role="assistant", content=[]),
        part("output_text", "It is", content_index=index),
        part("output_text", " 13.", content_index=0),
        part("output_text", "nowhere", output_index=7, content_index=0),
        api="responses",
    ).answer()
    assert answer.choices[0].messages[0]["content"] == "It is 13."


def test_an_item_that_is_done_takes_the_place_of_its_pieces():
    done = {"id": "m", "type": "message", "role": "assistant", "content": "It is 13."}
    second = {"id": "n", "type": "message", "role": "assistant", "content": " Sure."}
    for numbered in (True, False):
        at = [{"output_index": index} if numbered else {} for index in range(2)]
        answer = streamed(
            {**item("message", id="m", role="assistant", content=[]), **at[0]},
            part("output_text", "It", **at[0]),
            part("output_text", "", **at[0]),
            {"type": "response.output_item.done", "item": done, **at[0]},
            {"type": "response.output_item.done", "item": second, **at[1]},
            api="responses",
        ).answer()
        assert answer.choices[0].messages == [{"role": "assistant", "content": "It is 13. Sure."}]


def test_an_item_that_begins_with_text_goes_on_with_pieces():
    answer = streamed(
        item("message", id="m", role="assistant", content="It "),
        part("output_text", "is 13.", content_index=0),
        api="responses",
    ).answer()
    assert answer.choices[0].messages[0]["content"] == "It is 13."


def test_items_come_in_the_order_of_their_index():
    first, second = (
        {
            "type": "response.output_item.done",
            "output_index": index,
            "item": {"type": "message", "role": "assistant", "content": text},
        }
        for index, text in enumerate(["a", "b"])
    )
    answer = streamed(second, first, api="responses").answer()
    assert answer.choices[0].messages[0]["content"] == "ab"


def test_a_response_that_is_still_to_come_is_no_failure():
    answer = read_body({"id": "r1", "status": "queued", "output": []}, "responses")
    assert (answer.complete, answer.error, answer.choices) == (False, None, [])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "bad key", "code": 401}}, "bad key"),
        ([{"error": {"message": "bad key", "code": 400}}], "bad key"),
        ({"detail": "not found"}, "not found"),
        ({"detail": [{"loc": ["body"], "msg": "Field required"}]}, "Field required"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"error": True, "message": "too long"}, "too long"),
        ({"error": "too long"}, "too long"),
        ("too long", "too long"),
        ({"error": {"error": {"error": {"error": {"error": "deep"}}}}}, None),
        ({"error": {"code": 3}}, None),
        ([], None),
        (None, None),
    ],
)
def test_what_the_body_of_an_error_says(body, message):
    assert error_message(body) == message


def test_a_long_event_is_searched_once(monkeypatch):
    """Or a hundred megabytes without an end would take hours of the whole process."""
    searched = []

    class Counting:
        def search(self, data, start):
            searched.append(len(data) - start)

    monkeypatch.setattr("rollout.integrations.recording.streams._EVENT_END", Counting())
    events = Events()
    for _ in range(100):
        assert list(events.feed(b"x" * 1000)) == []
    assert sum(searched) < 101_000
    assert events.rest() == b"x" * 100_000


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_end_that_is_cut_anywhere_is_found(end):
    for size in range(1, 6):
        events, found = Events(), []
        data = (b"data: 1" + end) * 3
        for start in range(0, len(data), size):
            found += events.feed(data[start : start + size])
        assert found == [b"data: 1" + end] * 3
        assert events.rest() == b""
