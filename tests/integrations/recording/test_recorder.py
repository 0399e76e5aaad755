"""Which calls make one conversation, which one counts, and what is kept of the others."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integrations.scripted import others

from rollout import RolloutContext, SampleSource
from rollout._json.fit import fit
from rollout.errors import InvalidFieldError, SampleSourceError
from rollout.integrations.chat import ConversationRecorder, get_recorder
from rollout.integrations.recording import conversations
from rollout.integrations.recording.calls import load, read_body
from rollout.integrations.recording.streams import Events, StreamedAnswer
from rollout.trajectory import build_trajectory, trajectory_problems

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def user(text):
    return {"role": "user", "content": text}


def model(text, **more):
    return {"role": "assistant", "content": text, **more}


class Talk:
    """Records calls without a wire."""

    def __init__(self):
        self.recorder = ConversationRecorder()

    def begin(self, *messages, name="main", **body):
        return self.recorder.start(
            {"model": "policy", "messages": json.loads(json.dumps(messages)), **body},
            api="chat",
            conversation=name,
            at=NOW,
        )

    def end(self, call, *replies, reason="stop", usage=None):
        body = {
            "id": f"reply-{call.number}",
            "model": "m",
            "usage": usage,
            "choices": [
                {"index": n, "message": reply, "finish_reason": reason}
                for n, reply in enumerate(replies)
            ],
        }
        self.recorder.finish(call, read_body(load(json.dumps(body)), "chat"), 0.5)
        return body["id"]

    def ask(self, *messages, reply, usage=None, **options):
        return self.end(self.begin(*messages, **options), reply, usage=usage)

    def texts(self):
        return [message["content"] for message in self.recorder.messages]

    async def sample(self):
        sample = await self.recorder.get_sample()
        document = build_trajectory(sample.trajectory_messages, rollout_id="r", sample=sample)
        assert trajectory_problems(document) == []
        return sample


async def test_a_history_that_grows_is_one_conversation():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    talk.ask(user("a"), model("b"), user("c"), reply=model("d"))
    assert talk.texts() == ["a", "b", "c", "d"]
    assert others(await talk.sample()) == {}


@pytest.mark.parametrize(
    ("given_back", "said"),
    [
        (model(" b\n"), model("b")),
        (model([{"type": "text", "text": "b"}]), model("b")),
        (model("b", refusal=None, annotations=[], name=None), model("b")),
        (model("b"), model("b", reasoning_content="Hm.")),
        (model(""), model(None)),
        (
            model(
                None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": '{"x":1}'}}]
            ),
            model(
                None,
                tool_calls=[
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": 1}'},
                    }
                ],
            ),
        ),
    ],
)
async def test_replies_that_come_back_in_another_form(given_back, said):
    talk = Talk()
    talk.ask(user("a"), reply=said)
    talk.ask(user("a"), given_back, user("c"), reply=model("d"))
    sample = await talk.sample()
    assert others(sample) == {}
    # As the model gave it.
    assert sample.messages == [user("a"), said, user("c"), model("d")]


@pytest.mark.parametrize("count", [int("9" * 320), -5, 2**53, 1e300, float("inf"), True, "7"])
async def test_counts_that_cannot_be_right_are_left_out(count):
    talk = Talk()
    usage = {
        "prompt_tokens": count,
        "completion_tokens": 3.0,
        "prompt_tokens_details": {"cached_tokens": count},
    }
    talk.ask(user("a"), reply=model("b"), usage=usage)
    metrics = (await talk.sample()).metrics
    assert metrics["completion_tokens"] == 3
    assert metrics.keys().isdisjoint({"prompt_tokens", "cached_tokens"})


async def test_usage_in_the_history_of_the_prompt_is_not_counted_again():
    talk = Talk()
    history = [user("a"), model("b", usage={"prompt_tokens": 1000}), user("c")]
    talk.ask(*history, reply=model("d"), usage={"prompt_tokens": 15})
    sample = await talk.sample()
    assert sample.metrics["prompt_tokens"] == 15
    document = build_trajectory(sample.trajectory_messages, rollout_id="r", sample=sample)
    assert document["final_metrics"]["total_prompt_tokens"] == 15
    assert [step.get("is_copied_context") for step in document["steps"]] == [None, True, None, None]


def tokens(*ids):
    return {"content": [{"token": f"t{each}", "logprob": -0.5} for each in ids]}


@pytest.mark.parametrize("streamed", [False, True])
async def test_token_ids_and_log_probabilities_are_kept(streamed):
    talk = Talk()
    call = talk.begin(user("a"), return_token_ids=True, logprobs=True)
    if streamed:
        answer = StreamedAnswer("chat")
        for event in (
            {"model": "served", "prompt_token_ids": [1, 2], "choices": []},
            {"choices": [{"delta": {"content": "b"}, "token_ids": [3], "logprobs": tokens(3)}]},
            {"choices": [{"delta": {"content": "c"}, "token_ids": [4], "logprobs": tokens(4)}]},
            {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": None}]},
        ):
            answer.add(f"data: {json.dumps(event)}\n\n".encode())
        talk.recorder.finish(call, answer.answer(ended=True), 0.1)
    else:
        choice = {"message": model("bc"), "finish_reason": "stop"}
        choice |= {"token_ids": [3, 4], "logprobs": tokens(3, 4)}
        body = {"model": "served", "prompt_token_ids": [1, 2], "choices": [choice]}
        talk.recorder.finish(call, read_body(load(json.dumps(body)), "chat"), 0.1)
    sample = await talk.sample()
    first, known = sample.extra_fields["message_details"]
    assert first == {"timestamp": "2026-01-01T00:00:00Z"}
    assert known == {
        "timestamp": "2026-01-01T00:00:00.100000Z",
        "call": 1,
        "model": "served",
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": tokens(3, 4),
        "finish_reason": "stop",
        "latency_sec": 0.1,
    }
    assert sample.trajectory_messages == [{**user("a"), **first}, {**model("bc"), **known}]
    document = build_trajectory(sample.messages, rollout_id="r", sample=sample)
    metrics = document["steps"][1]["metrics"]
    assert metrics["prompt_token_ids"] == [1, 2]
    assert metrics["completion_token_ids"] == [3, 4]
    assert metrics["logprobs"] == [-0.5, -0.5]


@pytest.mark.parametrize("ids", [[], [1.5], [True], "12", {"0": 1}, None])
async def test_token_ids_that_are_none_are_left_out(ids):
    talk = Talk()
    call = talk.begin(user("a"))
    choice = {"message": model("b"), "token_ids": ids}
    body = {"prompt_token_ids": ids, "choices": [choice]}
    talk.recorder.finish(call, read_body(load(json.dumps(body)), "chat"), 0.1)
    known = (await talk.sample()).extra_fields["message_details"][1]
    assert known.keys() == {"timestamp", "call", "model", "latency_sec"}


async def test_extra_fields_of_ones_own():
    talk = Talk()
    talk.recorder.extra_fields["mood"] = "calm"
    assert (await talk.sample()).extra_fields == {"mood": "calm"}
    talk.ask(user("a"), reply=model("b"), tools=[{"type": "function"}])
    assert others(await talk.sample()) == {"mood": "calm", "tools": [{"type": "function"}]}


async def test_a_turn_that_is_tried_again_is_a_branch():
    talk = Talk()
    talk.ask(user("a"), reply=model("wrong"))
    talk.ask(user("a"), reply=model("right"))
    talk.ask(user("a"), model("right"), user("c"), reply=model("d"))
    assert talk.texts() == ["a", "right", "c", "d"]
    assert (await talk.sample()).extra_fields["branches"] == [
        {"conversation": "main", "after": 1, "messages": [model("wrong")]}
    ]


async def test_a_history_that_is_edited_goes_on_as_a_branch():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    talk.ask(user("a"), model("b"), user("c"), reply=model("d"))
    talk.ask(user("short"), user("e"), reply=model("f"))
    assert talk.texts() == ["short", "e", "f"]
    (branch,) = (await talk.sample()).extra_fields["branches"]
    assert (branch["after"], [each["content"] for each in branch["messages"]]) == (
        0,
        ["a", "b", "c", "d"],
    )


async def test_a_subordinate_agent_does_not_become_the_sample():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    talk.ask(user("sub"), reply=model("x"))
    talk.ask(user("sub"), model("x"), user("more"), reply=model("y"))
    talk.ask(user("a"), model("b"), user("y"), reply=model("done"))
    assert talk.texts() == ["a", "b", "y", "done"]


async def test_the_same_words_again_are_a_branch_of_their_own():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    talk.ask(user("a"), reply=model("b"))
    talk.ask(user("a"), model("b"), user("c"), reply=model("d"))
    # A turn that is tried again belongs to where it was tried before.
    talk.ask(user("a"), model("b"), user("c"), reply=model("e"))
    assert talk.texts() == ["a", "b", "c", "e"]
    branches = (await talk.sample()).extra_fields["branches"]
    assert [each["after"] for each in branches] == [2, 3]
    assert [each["messages"] for each in branches] == [[], [model("d")]]


async def test_a_call_in_its_old_form_is_compared_too():
    talk = Talk()
    said = model(None, function_call={"name": "f", "arguments": "{}"})
    talk.ask(user("a"), reply=said)
    talk.ask(user("a"), said, {"role": "function", "name": "f", "content": "1"}, reply=model("b"))
    assert len(talk.recorder.messages) == 4
    other = model(None, function_call={"name": "g", "arguments": "{}"})
    talk.ask(user("a"), other, reply=model("c"))
    assert len((await talk.sample()).extra_fields["branches"]) == 1


async def test_names_keep_conversations_apart():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    talk.ask(user("a"), model("b"), user("good?"), reply=model("yes"), name="critic")
    assert talk.texts() == ["a", "b"]
    assert (await talk.sample()).extra_fields["branches"][0]["conversation"] == "critic"
    talk.recorder.choose("critic")
    assert talk.texts() == ["a", "b", "good?", "yes"]
    with pytest.raises(InvalidFieldError, match="which"):
        talk.recorder.choose("nobody")


async def test_a_conversation_of_another_name_counts_where_there_is_no_other():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"), name="solver")
    assert talk.texts() == ["a", "b"]


async def test_the_best_of_several_calls_at_once_is_chosen():
    talk = Talk()
    calls = [talk.begin(user("a")) for _ in range(3)]
    ids = [talk.end(call, model(f"b{call.number}")) for call in (calls[1], calls[2], calls[0])]
    assert talk.texts() == ["a", "b3"]
    talk.recorder.choose(ids[0])
    assert talk.texts() == ["a", "b2"]
    # The choice goes on.
    talk.ask(user("a"), model("b2"), user("c"), reply=model("d"))
    assert talk.texts() == ["a", "b2", "c", "d"]
    branches = (await talk.sample()).extra_fields["branches"]
    assert [each["messages"] for each in branches] == [[model("b3")], [model("b1")]]


async def test_of_several_choices_the_first_counts_unless_the_agent_goes_on_with_another():
    talk = Talk()
    usage = {"prompt_tokens": 3, "completion_tokens": 6}
    reply = talk.end(talk.begin(user("a"), n=3), model("x"), model("y"), model("z"), usage=usage)
    assert talk.texts() == ["a", "x"]
    talk.recorder.choose(reply, choice=2)
    assert talk.texts() == ["a", "z"]
    assert (await talk.sample()).metrics["completion_tokens"] == 6
    talk.recorder.choose("main")
    talk.ask(user("a"), model("y"), user("c"), reply=model("d"))
    assert talk.texts() == ["a", "y", "c", "d"]


async def test_several_choices_later_on():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    talk.end(talk.begin(user("a"), model("b"), user("c"), n=2), model("d"), model("e"))
    assert talk.texts() == ["a", "b", "c", "d"]
    assert (await talk.sample()).extra_fields["branches"] == [
        {"conversation": "main", "after": 3, "messages": [model("e")]}
    ]


async def test_of_replies_that_were_broken_off_the_last_counts():
    talk = Talk()
    for text in ("a", "b"):
        call = talk.begin(user(text))
        streamed = StreamedAnswer("chat")
        streamed.add(b'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n')
        talk.recorder.finish(call, streamed.answer(), 0.1)
    assert talk.texts() == ["b", "half"]


async def test_a_reply_that_was_broken_off_counts_less_than_a_whole_one():
    talk = Talk()
    talk.ask(user("a"), reply=model("b"))
    call = talk.begin(user("other"))
    streamed = StreamedAnswer("chat")
    streamed.add(b'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n')
    talk.recorder.finish(call, streamed.answer(), 0.1)
    assert talk.texts() == ["a", "b"]
    # Unless the agent goes on with what there was.
    talk.ask(user("other"), model("half"), user("go on"), reply=model("whole"))
    assert talk.texts() == ["other", "half", "go on", "whole"]
    assert talk.recorder.metrics()["interrupted_calls"] == 1


def test_what_is_still_under_way_is_told():
    talk = Talk()
    call = talk.begin(user("a"))
    assert talk.recorder.metrics()["interrupted_calls"] == 1
    assert talk.texts() == ["a"]
    talk.end(call, model("b"))
    assert talk.recorder.metrics()["interrupted_calls"] == 0
    assert repr(talk.recorder) == "<ConversationRecorder: 1 calls, 1 conversations>"


def called(*calls, **more):
    functions = [{"name": name, "arguments": given} for _, name, given in calls]
    return model(
        None,
        tool_calls=[
            {"id": call_id, "type": "function", "function": function}
            for (call_id, _, _), function in zip(calls, functions, strict=True)
        ],
        **more,
    )


@pytest.mark.parametrize(
    ("said", "given_back"),
    [
        ("", "{}"),
        ("", " {} "),
        (None, "{}"),
        ("{}", ""),
        ("null", "{}"),
        ('{"x": 1.0, "y": [1e2]}', '{"y":[100],"x":1}'),
        ('{"x": "\\u00e9"}', '{"x": "é"}'),
        ('{"x": 1}', {"x": 1}),
    ],
)
async def test_a_call_that_comes_back_in_other_words_is_the_same_call(said, given_back):
    talk = Talk()
    talk.ask(user("a"), reply=called(("c1", "f", said)), usage={"completion_tokens": 7})
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    talk.ask(user("a"), called(("c1", "f", given_back)), result, reply=model("b", tool_calls=[]))
    talk.ask(
        user("a"),
        called(("c1", "f", given_back)),
        result,
        model("b", tool_calls=[]),
        user("c"),
        reply=model("d"),
    )
    sample = await talk.sample()
    assert others(sample) == {}
    assert sample.messages[1] == called(("c1", "f", said))
    assert sample.trajectory_messages[1]["usage"] == {"completion_tokens": 7}


@pytest.mark.parametrize(("said", "given_back"), [("0", "{}"), ("[]", "{}"), ("true", "1")])
def test_a_call_with_other_arguments_is_another_call(said, given_back):
    talk = Talk()
    talk.ask(user("a"), reply=called(("c1", "f", said)))
    talk.ask(user("a"), called(("c1", "f", given_back)), reply=model("b"))
    assert len(talk.recorder._conversations) == 2


@pytest.mark.parametrize("back", [{}, {"refusal": None}])
def test_a_history_is_read_once(monkeypatch, back):
    """Each call sends all of it, so that long ones would take longer to record than to send."""
    copied, compared = [], []
    key = conversations._key
    monkeypatch.setattr(conversations, "fit", lambda new: (copied.extend(new), fit(new))[1])
    monkeypatch.setattr(
        conversations, "_key", lambda each, **how: (compared.append(each), key(each, **how))[1]
    )
    talk, history = Talk(), []
    for number in range(20):
        history.append(user(f"question {number}"))
        talk.ask(*history, reply=model(f"reply {number}"))
        history.append(model(f"reply {number}", **back))
    assert len(talk.recorder.messages) == 40
    assert len(copied) <= 40
    assert len(compared) <= 80


@pytest.mark.parametrize("missing", [None, ""])
async def test_ids_that_an_agent_makes_up_are_taken_over(missing):
    """Some endpoints give calls of tools none, and the results have to name them."""
    talk = Talk()
    talk.ask(
        user("a"),
        reply=called((missing, "f", '{"x": 1}'), (missing, "g", "{}"), reasoning="Hm."),
        usage={"completion_tokens": 7},
    )
    results = [{"role": "tool", "tool_call_id": each, "content": "1"} for each in ("u1", "u2")]
    again = called(("u1", "f", '{"x":1}'), ("u2", "g", "{}"))
    talk.ask(user("a"), again, *results, reply=model("b"))
    talk.ask(user("a"), again, *results, model("b"), user("c"), reply=model("d"))
    sample = await talk.sample()
    assert others(sample) == {}
    assert sample.messages[1] == called(("u1", "f", '{"x": 1}'), ("u2", "g", "{}"), reasoning="Hm.")
    assert [each["role"] for each in sample.messages[2:]] == [
        "tool",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert sample.trajectory_messages[1]["usage"] == {"completion_tokens": 7}


@pytest.mark.parametrize("given", ["[" * 100_000, "[" * 980 + "]" * 980, "1" * 10_000, None])
async def test_whatever_a_model_calls_a_tool_with(given):
    """Such arguments are the model's doing; the recorder must not fail its caller."""
    talk = Talk()
    reply = called(("c1", "f", given))
    talk.ask(user("a"), reply=reply)
    talk.ask(user("a"), reply, {"role": "tool", "tool_call_id": "c1"}, reply=model("b"))
    assert talk.recorder.messages[1]["tool_calls"] == reply["tool_calls"]
    await check_sample(talk.recorder)


def test_an_agent_that_changes_the_call_itself_begins_a_branch():
    talk = Talk()
    talk.ask(user("a"), reply=called((None, "f", "{}")))
    talk.ask(user("a"), called(("u1", "f", '{"x": 2}')), reply=model("b"))
    talk.ask(user("a"), called(("u1", "g", "{}")), reply=model("c"))
    assert len(talk.recorder._conversations) == 3


def test_calls_with_ids_are_told_apart_by_them():
    talk = Talk()
    talk.ask(user("a"), reply=called(("c1", "f", "{}")))
    talk.ask(user("a"), called(("c2", "f", "{}")), reply=model("b"))
    assert len(talk.recorder._conversations) == 2


async def test_a_rollout_has_one_recorder_and_no_other_source():
    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1") as rollout:
        assert get_recorder() is get_recorder() is rollout.sample_source

    class Other(SampleSource):
        async def get_sample(self):
            raise AssertionError("not asked for here")

    with RolloutContext(chat_completions_url="http://h/v1", sample_source=Other()):
        with pytest.raises(SampleSourceError, match=r"\(Other\).*record=False"):
            get_recorder()


@given(st.data())
async def test_any_agent_that_only_adds_has_its_whole_history_in_the_sample(data):
    talk = Talk()
    history, words = [], st.sampled_from(["a", "b", "c", ""])
    for _ in range(data.draw(st.integers(1, 6))):
        history += [user(text) for text in data.draw(st.lists(words, min_size=1, max_size=2))]
        reply = model(data.draw(words))
        talk.ask(*history, reply=reply)
        history.append(reply)
    sample = await talk.sample()
    assert sample.messages == history
    assert others(sample) == {}


@given(st.data())
async def test_nothing_that_the_model_said_is_lost(data):
    """Whatever an agent sends: each reply is in the sample or in a branch, and nowhere twice."""
    talk = Talk()
    histories = [[]]
    count = data.draw(st.integers(1, 8))
    for number in range(count):
        history = [*data.draw(st.sampled_from(histories)), user(data.draw(st.sampled_from("ab")))]
        reply = model(f"reply {number}")
        talk.ask(*history, reply=reply)
        histories.append([*history, reply])
    sample = await talk.sample()
    assert sample.messages == histories[-1]
    branches = sample.extra_fields.get("branches", [])
    for branch in branches:
        whole = [*sample.messages[: branch["after"]], *branch["messages"]]
        assert whole in histories
    said = [m["content"] for m in sample.messages] + [
        m["content"] for branch in branches for m in branch["messages"]
    ]
    assert {f"reply {number}" for number in range(count)} <= set(said)
    assert sample.metrics["calls"] == count


EVENTS = [
    {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    {"choices": [{"index": 0, "delta": {"content": "é "}, "logprobs": {"content": [{"a": 1}]}}]},
    {"choices": [{"index": 0, "delta": {"content": "wörd"}, "logprobs": {"content": [{"a": 2}]}}]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {
                    "tool_calls": [
                        {"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}
                    ]
                },
            }
        ]
    },
    {"choices": [{"index": 0, "delta": {"tool_calls": [
        {"index": 0, "function": {"arguments": "{}"}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
]  # fmt: skip


@given(st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(1, 40)), st.booleans())
def test_a_stream_in_any_pieces_is_the_same_answer(newline, sizes, comments):
    text = "".join(
        f"{': still here' + newline * 2 if comments else ''}"
        f"data: {json.dumps(event, ensure_ascii=False)}{newline * 2}"
        for event in EVENTS
    )
    data = f"{text}data: [DONE]{newline * 2}".encode()
    events, streamed, passed = Events(), StreamedAnswer("chat"), b""
    for size in [*sizes, len(data)]:
        chunk, data = data[:size], data[size:]
        for event in events.feed(chunk):
            streamed.add(event)
            passed += event
    assert events.rest() == b""
    assert passed.decode() == f"{text}data: [DONE]{newline * 2}"
    answer = streamed.answer()
    assert (answer.complete, answer.error, answer.model) == (True, None, "m")
    assert answer.usage == {"prompt_tokens": 1, "completion_tokens": 2}
    (choice,) = answer.choices
    assert choice.messages == [
        {
            "role": "assistant",
            "content": "é wörd",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        }
    ]
    assert choice.logprobs == {"content": [{"a": 1}, {"a": 2}]}
    assert choice.finish_reason == "tool_calls"


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers() | st.text(max_size=2), max_size=2)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
)


def shaped(**fields):
    """An object of about the right shape: each field may be missing or junk."""
    return st.fixed_dictionaries({}, optional={name: JUNK | each for name, each in fields.items()})


TEXT = st.text(max_size=5)
PART = shaped(type=st.sampled_from(["output_text", "input_text", "refusal", "text"]), text=TEXT)
FUNCTION = shaped(name=TEXT, arguments=TEXT)
CALL = shaped(index=st.integers(0, 2), id=TEXT, function=FUNCTION)
MESSAGE = shaped(
    role=st.sampled_from(["assistant", "user", "tool"]),
    content=TEXT | st.lists(JUNK | PART, max_size=2),
    tool_calls=st.lists(JUNK | CALL, max_size=2),
    function_call=FUNCTION,
    reasoning=TEXT,
)
CHOICE = shaped(
    index=st.integers(0, 2),
    message=MESSAGE,
    delta=MESSAGE,
    logprobs=shaped(content=st.lists(JUNK, max_size=2)),
    finish_reason=TEXT,
)
USAGE = shaped(
    prompt_tokens=st.integers(0, 9),
    output_tokens=st.integers(0, 9),
    prompt_tokens_details=shaped(cached_tokens=st.integers(0, 9)),
)
KINDS = ["message", "reasoning", "function_call", "function_call_output", "web_search_call"]
ITEM = shaped(
    type=st.sampled_from(KINDS),
    role=st.sampled_from(["assistant", "user"]),
    content=TEXT | st.lists(JUNK | PART, max_size=2),
    summary=st.lists(JUNK | PART, max_size=2),
    call_id=TEXT,
    name=TEXT,
    arguments=TEXT,
    output=TEXT | st.lists(JUNK | PART, max_size=2),
)
RESPONSE = shaped(
    id=TEXT,
    status=st.sampled_from(["completed", "incomplete", "failed", "queued"]),
    incomplete_details=shaped(reason=TEXT),
    error=shaped(message=TEXT),
    usage=USAGE,
    output=st.lists(JUNK | ITEM, max_size=3),
    messages=st.lists(JUNK | MESSAGE, max_size=3),
    input=st.lists(JUNK | ITEM, max_size=3),
    instructions=TEXT,
    choices=st.lists(JUNK | CHOICE, max_size=3),
)
EVENT = shaped(
    type=st.sampled_from(
        [
            "response.completed",
            "response.output_item.added",
            "response.output_item.done",
            "response.output_text.delta",
            "response.reasoning_summary_text.delta",
            "response.function_call_arguments.delta",
            "error",
        ]
    ),
    response=RESPONSE,
    item=ITEM,
    delta=TEXT,
    output_index=st.integers(-1, 2),
    content_index=st.integers(-1, 2),
    logprobs=st.lists(JUNK, max_size=2),
    choices=st.lists(JUNK | CHOICE, max_size=3),
    usage=USAGE,
)


@given(
    st.lists(st.tuples(JUNK | RESPONSE, JUNK | RESPONSE), min_size=1, max_size=2),
    st.sampled_from(["chat", "responses"]),
)
async def test_whatever_is_sent_and_answered_is_no_error_of_the_recorder(calls, api):
    recorder = ConversationRecorder()
    for sent, value in calls:
        body = sent if isinstance(sent, dict) else {}
        call = recorder.start(body, api=api, conversation="main", at=NOW)
        recorder.finish(call, read_body(load(json.dumps(value)), api), 0.1)
    await check_sample(recorder)


@given(st.lists(JUNK | EVENT, max_size=4), st.sampled_from(["chat", "responses"]))
async def test_whatever_comes_in_a_stream_is_no_error_of_the_recorder(values, api):
    recorder = ConversationRecorder()
    call = recorder.start({"messages": [user("a")]}, api=api, conversation="main", at=NOW)
    answer = StreamedAnswer(api)
    for value in values:
        answer.add(b"data: " + json.dumps(value).encode())
    recorder.finish(call, answer.answer(ended=True), 0.1)
    await check_sample(recorder)


async def check_sample(recorder):
    sample = await recorder.get_sample()
    document = build_trajectory(sample.trajectory_messages, rollout_id="r", sample=sample)
    assert trajectory_problems(document) == []
    assert json.loads(json.dumps(sample.metrics, allow_nan=False)) == sample.metrics
