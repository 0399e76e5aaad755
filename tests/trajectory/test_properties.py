"""Whatever the messages look like: the document is valid, nothing is lost, no secret gets in."""

from __future__ import annotations

import base64
import copy
import html
import json
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trajectory.drawn import FULL, REPLACEMENTS, damaged, histories, places, said

from rollout.codec import dump_json, parse_json
from rollout.trajectory import build_trajectory, token_totals, trajectory_problems
from rollout.types import RolloutSample


@settings(max_examples=150)
@given(history=histories)
@example(history=[])
def test_every_history_gives_a_valid_document(history):
    document = build_trajectory(history, rollout_id="r")
    assert trajectory_problems(document) == []
    assert parse_json(dump_json(document)) == document


@settings(max_examples=150)
@given(history=histories)
def test_nothing_is_lost(history):
    assert said(history) <= said(build_trajectory(history, rollout_id="r"))


@settings(max_examples=100)
@given(history=histories)
def test_the_messages_stay_as_they_are_and_the_document_is_the_same_each_time(history):
    before = copy.deepcopy(history)
    first = build_trajectory(history, rollout_id="r")
    first["steps"].clear()
    assert history == before
    assert build_trajectory(history, rollout_id="r") == build_trajectory(before, rollout_id="r")


@settings(max_examples=100)
@given(history=histories)
def test_each_call_of_a_step_has_an_id_of_its_own(history):
    for step in build_trajectory(history, rollout_id="r")["steps"]:
        ids = [call["tool_call_id"] for call in step.get("tool_calls", [])]
        assert len(ids) == len(set(ids))
        assert all(ids)


def forms(secret):
    """A secret as it may stand in text."""
    return [
        secret,
        repr(secret),
        json.dumps({"key": secret}),
        json.dumps(json.dumps(secret)),
        f"https://host.invalid/?key={quote(secret, safe='')}",
        f"Basic {base64.b64encode(f'user:{secret}'.encode()).decode()}",
        base64.urlsafe_b64encode(f"x{secret}yz".encode()).decode(),
    ]


SECRET = "sk-hunter2/with+marks"
secret_texts = st.sampled_from(forms(SECRET))


def traces(text):
    """What of the secret can be read off a text."""
    plain = base64.b64encode(b"user:" + SECRET.encode()).decode()[8:24]
    other = base64.urlsafe_b64encode(b"x" + SECRET.encode()).decode()[4:20]
    found = [form for form in (SECRET, quote(SECRET, safe=""), plain, other) if form in text]
    return found + (["hunter2"] if "hunter2" in text else [])


@settings(max_examples=120)
@given(history=histories, texts=st.lists(secret_texts, min_size=1, max_size=4), data=st.data())
def test_no_secret_gets_in(history, texts, data):
    history = copy.deepcopy(history)
    for text in texts:
        spots = places(history)[1:]
        if not spots:
            history.append({"role": "user", "content": text})
            continue
        *way, last = data.draw(st.sampled_from(spots))
        owner = history
        for key in way:
            owner = owner[key]
        if isinstance(owner, dict) and data.draw(st.booleans()):
            owner[text] = owner.pop(last)
        elif way:
            owner[last] = text
        else:
            history.append({"role": "assistant", "content": text})
    document = build_trajectory(
        history,
        rollout_id="r",
        sample=RolloutSample(label=texts[0], extra_fields={texts[0]: texts}),
        metadata={"x": texts, texts[0]: 1},
        model_name=texts[0],
        secrets=[None, SECRET],
        extra={"y": texts},
    )
    assert traces(json.dumps(document)) == []
    assert "[redacted]" in json.dumps(document)
    assert trajectory_problems(document) == []


def test_a_secret_behind_escapes_in_encoded_arguments():
    hidden = "".join(f"\\u{ord(char):04x}" for char in SECRET)
    call = {"id": "c", "function": {"name": "f", "arguments": f'{{"key": "{hidden}"}}'}}
    history = [{"role": "assistant", "tool_calls": [call]}]
    document = build_trajectory(history, rollout_id="r", secrets=[SECRET])
    assert document["steps"][0]["tool_calls"][0]["arguments"] == {"key": "[redacted]"}


def test_keys_that_become_the_same_are_both_kept():
    history = [{"role": "user", "content": "x", "sk-secret": 1, "[redacted]": 2}]
    document = build_trajectory(history, rollout_id="r", secrets=["sk-secret"])
    assert sorted(document["steps"][0]["extra"].values()) == [1, 2]


def test_text_that_only_looks_like_a_secret_stays():
    text = html.escape("<sk> hunter & co")
    document = build_trajectory(
        [{"role": "user", "content": text}], rollout_id="r", secrets=[SECRET, "", None, "abc"]
    )
    assert document["steps"][0]["message"] == text


class Odd:
    def __repr__(self):
        raise AssertionError("nobody may look")


@pytest.mark.parametrize(
    "value",
    [float("nan"), {1, 2}, b"x", Odd(), "\ud800", 10**5000, lambda: None, [[Odd()]]],
    ids=["nan", "set", "bytes", "object", "surrogate", "digits", "function", "nested"],
)
def test_values_without_a_json_form(value):
    history = [{"role": "user", "content": "x", "odd": value}, {"role": value, "content": value}]
    document = build_trajectory(
        history,
        rollout_id="r",
        metadata={"odd": value},
        sample=RolloutSample(metrics={"odd": value}),
    )
    assert trajectory_problems(document) == []
    assert dump_json(document).decode().encode("utf-8")
    if not isinstance(value, str):
        assert any("messages[0].odd" in line for line in document["extra"]["dropped"])
        assert any("metadata.odd" in line for line in document["extra"]["dropped"])


def test_a_structure_that_contains_itself_or_nests_too_deeply():
    loop = {"role": "user", "content": "x"}
    loop["self"] = loop
    deep = leaf = []
    for _ in range(500):
        leaf.append([])
        leaf = leaf[0]
    encoded = '{"a":' * 120 + "1" + "}" * 120
    history = [
        loop,
        {"role": "user", "content": deep},
        {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "args": encoded}]},
    ]
    document = build_trajectory(history, rollout_id="r", metadata={"deep": deep})
    assert parse_json(dump_json(document)) == document
    assert len(document["extra"]["dropped"]) == 3
    assert document["steps"][2]["tool_calls"][0]["arguments"] == {"_raw": encoded}


# --- the checker ------------------------------------------------------------------------------


def test_a_document_with_every_field_is_valid():
    assert trajectory_problems(FULL) == []


@settings(max_examples=150)
@given(document=damaged(4) | st.sampled_from(REPLACEMENTS))
def test_the_checker_takes_anything(document):
    problems = trajectory_problems(document)
    assert all(isinstance(line, str) and "\n" not in line for line in problems)
    assert len(problems) <= 200
    prompt, completion = token_totals(document if isinstance(document, dict) else {})
    assert prompt is None or prompt >= 0
    assert completion is None or completion >= 0


def changed(*way, value):
    document = copy.deepcopy(FULL)
    owner = document
    for key in way[:-1]:
        owner = owner[key]
    owner[way[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ([], "trajectory: must be an object, not a list"),
        (changed("steps", value=[]), "trajectory.steps: must not be empty"),
        (changed("steps", 3, "step_id", value=5), "trajectory.steps[3].step_id: must be 4, not 5"),
        (changed("more", value=1), "trajectory.more: is not a field of ATIF"),
        (
            changed("steps", 0, "metrics", value={}),
            "trajectory.steps[0].metrics: belongs to steps of the agent only",
        ),
        (
            changed("steps", 3, "reasoning_content", value="r"),
            "trajectory.steps[3].reasoning_content: contradicts llm_call_count 0",
        ),
        (
            changed("steps", 2, "tool_calls", 0, "tool_call_id", value="d"),
            "trajectory.steps[2].observation.results[0].source_call_id: does not name a call",
        ),
        (
            changed("subagent_trajectories", 1, "trajectory_id", value="sub"),
            "trajectory.subagent_trajectories[1].trajectory_id: is used by another subagent too",
        ),
        (
            changed("steps", 0, "timestamp", value="now"),
            "trajectory.steps[0].timestamp: is not an ISO 8601 time",
        ),
        (changed("agent", "name", value=None), "trajectory.agent.name: must be a string, not null"),
        (
            changed("steps", 2, "metrics", "prompt_tokens", value="1"),
            "trajectory.steps[2].metrics.prompt_tokens: must be a whole number, not a string",
        ),
        (
            changed("steps", 2, "metrics", "cost_usd", value=True),
            "trajectory.steps[2].metrics.cost_usd: must be a number, not a boolean",
        ),
        (
            changed("steps", 2, "is_copied_context", value="yes"),
            "trajectory.steps[2].is_copied_context: must be true or false, not a string",
        ),
    ],
)
def test_problems_name_their_place(document, line):
    problems = trajectory_problems(document)
    assert len(problems) == 1
    assert problems[0].startswith(line)


def test_all_problems_are_named():
    document = changed("agent", value={})
    document["steps"][0]["source"] = "critic"
    assert [line.partition(":")[0] for line in trajectory_problems(document)] == [
        "trajectory.agent.name",
        "trajectory.agent.version",
        "trajectory.steps[0].source",
    ]


def test_documents_of_subagents_that_nest_without_end_are_refused():
    document = copy.deepcopy(FULL)
    for _ in range(100):
        document = {**copy.deepcopy(FULL), "subagent_trajectories": [document]}
    assert any("nests too deeply" in line for line in trajectory_problems(document))


@pytest.mark.parametrize("place", places(FULL)[1:], ids=str)
def test_no_number_has_too_many_digits_to_be_judged(place):
    for value in ("1" * 5000, "-" + "1" * 5000, "0" * 5000, 10**5000, -(10**5000)):
        problems = trajectory_problems(changed(*place, value=value))
        assert all(len(problem) < 200 for problem in problems)
