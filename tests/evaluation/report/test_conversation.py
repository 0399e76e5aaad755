"""What of a trajectory document the page shows, whatever the document is like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout._page import conversation
from rollout._page.conversation import MAX_TEXT, first_prompt, view
from rollout._page.text import embed, line, number, parse, pretty, shown


def test_tool_calls_have_their_observations() -> None:
    document = {
        "agent": {"name": "a", "model_name": "m", "tool_definitions": [{"type": "function"}]},
        "steps": [
            {
                "source": "agent",
                "message": "look",
                "reasoning_content": "why",
                "timestamp": "2026-01-01T00:00:00Z",
                "tool_calls": [
                    {"tool_call_id": "1", "function_name": "f", "arguments": {"code": "a\nb"}},
                    {"tool_call_id": "2", "function_name": "g", "arguments": {"x": {"y": 1}}},
                ],
                "observation": {
                    "results": [
                        {"source_call_id": "2", "content": "two"},
                        {"source_call_id": "1", "content": [{"type": "text", "text": "one"}]},
                        {"content": "loose"},
                    ]
                },
                "metrics": {"prompt_tokens": 5, "logprobs": [-1, -2, -3], "cost_usd": None},
            }
        ],
    }
    found = view(document)

    assert found["model"] == "m"
    assert json.loads(found["tools"]) == [{"type": "function"}]
    (step,) = found["steps"]
    assert step["c"] == [
        {"name": "f", "args": [["code", "a\nb"]], "o": [{"t": "one"}], "id": "1"},
        {"name": "g", "args": [["x", '{\n  "y": 1\n}']], "o": [{"t": "two"}], "id": "2"},
    ]
    assert step["o"] == [{"t": "loose"}]
    assert step["m"] == [["prompt_tokens", 5], ["logprobs", 3, "count"]]
    assert (step["s"], step["t"], step["r"]) == ("agent", "look", "why")
    assert step["at"] == "2026-01-01T00:00:00Z"


def test_label_and_metadata_stand_apart_from_the_rest() -> None:
    extra = {"label": "42", "metadata": {"a": 1}, "reward": 1.0, "seed": 7, "row": 3}
    document = {"steps": [], "extra": extra, "notes": "n", "final_metrics": {"total_steps": 0}}
    found = view(document)
    assert found["label"] == "42"
    assert json.loads(found["metadata"]) == {"a": 1}
    assert json.loads(found["extra"]) == {"seed": 7, "notes": "n"}


def test_pictures_are_named_and_not_fetched() -> None:
    image = {"type": "image", "source": {"media_type": "image/png", "path": "http://x/y.png"}}
    (step,) = view({"steps": [{"source": "user", "message": [image]}]})["steps"]
    assert step["t"] == "[image: http://x/y.png]"


def test_long_text_is_cut_and_says_so() -> None:
    (step,) = view({"steps": [{"source": "user", "message": "x" * (MAX_TEXT + 1234)}]})["steps"]
    assert step["t"].startswith("x" * MAX_TEXT)
    assert step["t"].endswith("… 1,234 more characters in the trajectory file")


def test_a_long_conversation_keeps_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_VIEW", 10_000)
    steps = [{"source": "user", "message": "z" * 900} for _ in range(60)]
    found = view({"steps": steps})
    assert len(found["steps"]) == 60
    assert sum(step["t"].count("z") for step in found["steps"]) <= 10_000


def test_no_step_has_thousands_of_parts() -> None:
    results = [{"source_call_id": "1", "content": "r"}] * 500
    calls = [{"tool_call_id": "1", "function_name": "f", "arguments": dict.fromkeys(range(500))}]
    step = {
        "source": "agent",
        "tool_calls": calls * 500,
        "observation": {"results": results},
        "metrics": dict.fromkeys(range(500), 1),
    }
    (found,) = view({"steps": [step]})["steps"]
    assert len(found["c"]) == 201
    assert found["c"][200]["name"] == "… 300 more"
    assert len(found["c"][0]["args"]) == 201
    assert found["c"][0]["args"][200] == ["", "… 300 more"]
    assert len(found["c"][0]["o"]) == 200
    assert found["o"] == [{"t": "… 300 more"}]
    assert len(found["m"]) == 200


def test_steps_beyond_the_most_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_STEPS", 3)
    found = view({"steps": [{"source": "user", "message": "x"}] * 5})
    assert (len(found["steps"]), found["left"]) == (3, 2)


def test_first_prompt_is_one_line() -> None:
    steps = [{"source": "system", "message": "s"}, {"source": "user", "message": "a\n\n b" * 100}]
    assert first_prompt({"steps": steps}, 12) == "a ba ba ba …"
    assert first_prompt({"steps": "none"}, 12) == ""


NAMES = [
    *("steps", "source", "message", "tool_calls", "observation", "results", "metrics", "extra"),
    *("agent", "name", "content", "tool_call_id", "source_call_id", "function_name", "arguments"),
    *("type", "text", "path", "label"),
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["user", "agent", "</script>", "1"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(NAMES) | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)


@given(json_values, json_values, json_values)
@example({"source": []}, None, None)
@example({"source": {}}, None, None)
def test_any_document_has_a_view(steps: Any, extra: Any, agent: Any) -> None:
    document = {"steps": [steps, {"source": "agent", **_calls(steps)}], "extra": extra}
    document["agent"] = agent
    found = view(document)
    assert len(found["steps"]) == 2
    # It can be written as strict JSON: everything in it is text or a finite number.
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert isinstance(first_prompt(document, 50), str)


def _calls(value: Any) -> dict[str, Any]:
    return {"message": value, "tool_calls": value, "observation": value, "metrics": value}


@given(json_values)
def test_embedded_json_holds_no_markup_and_reads_back(value: Any) -> None:
    try:
        text = embed(value)
    except ValueError:
        assert "NaN" in json.dumps(value) or "Infinity" in json.dumps(value)
        return
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


@given(st.text(st.characters()), st.integers(1, 30))
def test_a_shown_line_fits_and_is_harmless(text: str, limit: int) -> None:
    found = shown(text, limit)
    assert len(found) <= limit
    assert "\n" not in found
    found.encode("utf-8")
    assert not set("\u202e\u2066\0\u2028") & set(found)


def test_what_hides_is_replaced_and_what_shapes_letters_stays() -> None:
    hidden = "\xad\u180e\u3164\u200b\u206a\u206f\ufff9\ufffb\U000e0001\U000e007f\U000e0100\u115f"
    assert shown(f"a{hidden}b") == f"a{chr(0xFFFD) * len(hidden)}b"
    shaped = "\u0646\u200c\u0627 \U0001f469\u200d\U0001f52c \u2764\ufe0f \u3042"
    assert shown(shaped) == shaped


def test_numbers() -> None:
    values = [1, 1.5, -0.0, 1e308, float("nan"), float("inf"), 10**400, True, "1", None]
    assert [number(value) for value in values] == [1, 1.5, -0.0, 1e308, *[None] * 6]


def test_json_is_read_leniently() -> None:
    assert parse(b'{"a": NaN, "a": 1}') == {"a": 1}
    assert parse(b"1" * 5000) == "1" * 5000
    with pytest.raises(ValueError, match="nests too deep"):
        parse(b"[" * 100_000)


def test_what_nests_too_deep_is_named() -> None:
    value: Any = "x"
    for _ in range(100_000):
        value = [value]
    assert pretty(value) == "(nests too deep to be shown)"
    assert line("a  b\n c", 4) == "a b…"
