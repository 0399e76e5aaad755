"""Drawn histories in every form that agents use, and drawn faults in documents.

Every string in a history that says something is a marker (``m12x``), so that a test can look
for each of them in the document.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import strategies as st

markers = st.integers(0, 10**9).map(lambda number: f"m{number}x")
names = markers.map(lambda text: f"k{text}")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | markers
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(names, values, max_size=3)

call_ids = st.sampled_from(["c1", "c2", "c3"])
strange_ids = call_ids | values
urls = st.builds(
    lambda marker, end: f"https://host.invalid/{marker}{end}",
    markers,
    st.sampled_from([".png", ".JPG", ".webp?x=1", ".mp3", ".wav", ".html", ""]),
) | markers.map(lambda marker: f"data:image/png;base64,{marker}")

arguments = st.one_of(
    objects,
    objects.map(json.dumps),
    values.map(json.dumps),
    markers,
    st.sampled_from(["", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 200 + "]" * 200]),
    values,
)


def mixed(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the fields, sometimes with strange values, and some of others."""
    strange = {name: st.one_of(plain, plain, plain, values) for name, plain in fields.items()}
    return st.builds(
        lambda known, more: known | more,
        st.fixed_dictionaries({}, optional=strange),
        st.dictionaries(names, values, max_size=1),
    )


def kind(which: str, /, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return mixed(**fields).map(lambda fields: {"type": which, **fields})


parts = st.one_of(
    markers,
    kind("text", text=markers),
    kind("output_text", text=markers, annotations=st.just([])),
    kind("image_url", image_url=urls | mixed(url=urls, detail=markers)),
    kind("input_image", image_url=urls, detail=markers),
    kind("image", source=mixed(type=st.just("url"), url=urls, media_type=markers)),
    kind("audio_url", audio_url=mixed(url=urls), duration_sec=st.floats(0, 10)),
    kind("input_audio", input_audio=mixed(data=markers, format=markers)),
    kind("thinking", thinking=markers, signature=markers),
    kind("tool_use", id=call_ids, name=markers, input=arguments),
    kind("tool_result", tool_use_id=call_ids, content=values, is_error=st.booleans()),
    values,
)
contents = st.one_of(st.none(), markers, st.lists(parts, max_size=4), parts, values)

calls = st.one_of(
    mixed(
        id=call_ids,
        type=st.just("function"),
        function=mixed(name=markers, arguments=arguments),
    ),
    mixed(id=call_ids, type=st.just("custom"), custom=mixed(name=markers, input=markers)),
    mixed(id=call_ids, name=markers, args=arguments),
    values,
)
tokens = st.integers(-5, 10**6) | st.floats(allow_nan=False, allow_infinity=False)
usages = mixed(
    prompt_tokens=tokens,
    completion_tokens=tokens,
    input_tokens=tokens,
    output_tokens=tokens,
    cache_read_input_tokens=tokens,
    cached_tokens=tokens,
    prompt_tokens_details=mixed(cached_tokens=tokens),
    cost=tokens,
)
logprobs = st.one_of(
    st.lists(st.floats(-5, 0), max_size=3),
    st.builds(
        lambda numbers: {"content": [{"token": "t", "logprob": n} for n in numbers]},
        st.lists(st.floats(-5, 0), max_size=3),
    ),
    st.none(),
)
stamps = st.integers(0, 999_999).map(lambda number: f"2026-01-02T03:04:05.{number:06}Z")
times = stamps | st.sampled_from(["2026-01-02", 1.7e9, 1_700_000_000_000, 3, "yesterday"])
roles = st.sampled_from(
    ["system", "developer", "user", "assistant", "tool", "function", "model", "critic"]
)

messages = st.one_of(
    mixed(role=roles, content=contents, name=markers, timestamp=times),
    mixed(
        content=contents,
        tool_calls=st.lists(calls, max_size=3),
        function_call=mixed(name=markers, arguments=arguments),
        reasoning_content=markers,
        reasoning=values,
        reasoning_effort=markers,
        model=markers,
        usage=usages,
        logprobs=logprobs,
        completion_token_ids=st.lists(st.integers(0, 9), max_size=3),
        cost=tokens,
        created=times,
        refusal=markers,
    ).map(lambda fields: {**fields, "role": "assistant"}),
    mixed(tool_call_id=call_ids, content=contents, name=markers, timestamp=times).map(
        lambda fields: {**fields, "role": "tool"}
    ),
    kind("function_call", call_id=strange_ids, name=markers, arguments=arguments, id=markers),
    kind("function_call_output", call_id=call_ids, output=contents, status=markers),
    kind("web_search_call", id=call_ids, action=values, timestamp=times),
    kind(
        "reasoning",
        timestamp=times,
        summary=st.lists(kind("summary_text", text=markers), max_size=2),
    ),
    kind("message", role=roles, content=contents, created_at=times),
    kind("human", content=contents),
    objects,
)
histories = st.lists(messages, max_size=8)


def said(value: Any) -> set[str]:
    """Every marker in a value, be it a string or a key or a time, also inside of JSON text."""
    return set(re.findall(r"m\d+x|05\.\d{6}Z", json.dumps(value)))


# --- faults -----------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "schema_version": "ATIF-v1.8",
    "session_id": "s",
    "trajectory_id": "t",
    "agent": {
        "name": "a",
        "version": "1",
        "model_name": "m",
        "tool_definitions": [{"type": "function"}],
        "extra": {"x": 1},
    },
    "steps": [
        {"step_id": 1, "source": "system", "message": "s", "timestamp": "2026-01-02T03:04:05Z"},
        {
            "step_id": 2,
            "source": "user",
            "message": [
                {"type": "text", "text": "t"},
                {"type": "image", "source": {"media_type": "image/png", "path": "s3://i"}},
                {
                    "type": "audio",
                    "source": {"media_type": "audio/wav", "path": "s3://a", "duration_sec": 1.5},
                },
            ],
        },
        {
            "step_id": 3,
            "source": "agent",
            "model_name": "m",
            "reasoning_effort": "high",
            "message": "",
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "tool_call_id": "c",
                    "function_name": "f",
                    "arguments": {"a": 1},
                    "extra": {"e": 1},
                }
            ],
            "observation": {
                "results": [
                    {
                        "source_call_id": "c",
                        "content": "o",
                        "subagent_trajectory_ref": [
                            {"trajectory_id": "sub", "session_id": "s", "extra": {}},
                            {"trajectory_path": "p"},
                        ],
                    },
                    {"content": [{"type": "text", "text": "t"}], "extra": {}},
                ]
            },
            "metrics": {
                "prompt_tokens": 1,
                "completion_tokens": 2,
                "cached_tokens": 0,
                "cost_usd": 0.5,
                "prompt_token_ids": [1],
                "completion_token_ids": [2, 3],
                "logprobs": [-0.5, -1],
                "extra": {},
            },
            "is_copied_context": False,
            "llm_call_count": 1,
            "extra": {},
        },
        {"step_id": 4, "source": "agent", "message": "m", "llm_call_count": 0},
    ],
    "notes": "n",
    "final_metrics": {
        "total_prompt_tokens": 1,
        "total_completion_tokens": 2,
        "total_cached_tokens": 0,
        "total_cost_usd": 0.5,
        "total_steps": 4,
        "extra": {},
    },
    "continued_trajectory_ref": "next.json",
    "extra": {"reward": 1.0},
    "subagent_trajectories": [
        {
            "schema_version": "ATIF-v1.7",
            "trajectory_id": "sub",
            "agent": {"name": "b", "version": "2"},
            "steps": [{"step_id": 1, "source": "user", "message": "u"}],
        },
        {
            "trajectory_id": "sub2",
            "agent": {"name": "b", "version": "2"},
            "steps": [{"step_id": 1, "source": "user", "message": "u"}],
        },
    ],
}
"""A valid document with every field that there is."""

REPLACEMENTS: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 2.5, -0.5, 1e300, 10**30, 10**400, "", "1", " 2 ", "+3",
    "1_0", "4.0", "1.5", "1e2", "-1", "nan", "inf", "true", "Yes", "off", "x", "\u2028", "é",
    "agent", "user", "system", "text", "image", "audio", "image/png", "audio/wav", " AUDIO/MP3 ",
    "IMAGE/PNG", "ATIF-v1.0", "ATIF-v1.9", "c", "sub", "2026-01-02", "2026-01-02T03:04:05Z",
    "20260102T030405", "2026-13-01", "03:04", [], {}, [1], ["1"], ["x"], [None], [{}],
    {"a": 1}, {"\u2028": 1}, {"type": "text", "text": "t"}, [{"type": "text", "text": ""}],
    [{"type": "text"}], {"media_type": "audio/mpeg", "path": ""},
    {"media_type": "image/gif", "path": "x"}, {"results": []}, {"results": None},
    "9" * 4300, "-" + "9" * 4301, "9" * 5000, "0" * 5000, "+" + "0" * 5000 + "1", "0_1",
]  # fmt: skip
KEYS = [
    "extra", "message", "source", "text", "content", "metrics", "tool_calls", "observation",
    "reasoning_content", "model_name", "llm_call_count", "step_id", "session_id", "path",
    "trajectory_id", "duration_sec", "unknown", "", "source_call_id", "timestamp",
]  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value within a document."""
    found = [way]
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*way, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*way, index))
    return found


@st.composite
def damaged(draw: Any, faults: int = 2) -> dict[str, Any]:
    """A document in which something was replaced, removed or added."""
    document = copy.deepcopy(FULL)
    for _ in range(draw(st.integers(0, faults))):
        *way, last = draw(st.sampled_from(places(document)[1:] or [("extra",)]))
        owner: Any = document
        for key in way:
            owner = owner[key]
        action = draw(st.sampled_from(["replace", "replace", "remove", "add", "again"]))
        value = copy.deepcopy(draw(st.sampled_from(REPLACEMENTS)))
        if action == "replace":
            owner[last] = value
        elif action == "remove" and last in (owner if isinstance(owner, dict) else range(99)):
            del owner[last]
        elif isinstance(owner, dict):
            owner[draw(st.sampled_from(KEYS))] = value
        elif action == "again":
            owner.append(copy.deepcopy(owner[0]))
        else:
            owner.append(value)
    return document
