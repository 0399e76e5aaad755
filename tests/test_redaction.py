"""A key is not found again, in whatever form it was written down."""

from __future__ import annotations

import base64
import html
import json
from itertools import pairwise
from urllib.parse import quote, quote_plus

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout._redaction import (
    _DUMMIES,
    RedactedStream,
    Redactor,
    environment_secrets,
    public_url,
    redact,
    url_secrets,
)
from rollout.context import RolloutContext
from rollout.types import RolloutInitRequest

WRITERS = {
    "plain": str,
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda text: repr(text.encode()),
    "json": json.dumps,
    "json in utf-8": lambda text: json.dumps(text, ensure_ascii=False),
    "json in json": lambda text: json.dumps(json.dumps(text)),
    "json in json in json": lambda text: json.dumps(json.dumps(json.dumps(text))),
    "repr of json": lambda text: repr(json.dumps(text)),
    "repr with both quotes": lambda text: repr(f"'\"{text}"),
    "json of javascript": lambda text: json.dumps(text).replace("/", "\\/"),
    "url": lambda text: quote(text, safe=""),
    "url with reserved characters": lambda text: quote(text, safe="!$&'()*+,;=:@/?"),
    "url in lower case": lambda text: quote(text, safe="").lower() if text == text.lower() else "",
    "form": quote_plus,
    "query of httpx": lambda text: str(httpx.URL("http://a.invalid", params={"k": text})),
    "html": html.escape,
    "html without quotes": lambda text: html.escape(text, quote=False),
    "hex": lambda text: text.encode().hex(),
    "upper hex": lambda text: text.encode().hex().upper(),
}
KEY_OF_STREAM = "key-of-a-stream"
keys = st.text(
    st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=8, max_size=30
).filter(lambda key: key.strip().lower() not in _DUMMIES)


@pytest.mark.parametrize("how", WRITERS)
@settings(max_examples=60)
@given(key=keys)
@example(key="key%")
@example(key="key&")
@example(key="key\\")
def test_no_way_of_writing_hides_a_key(how, key):
    written = WRITERS[how](key)
    assert WRITERS[how](key) in ("", written)
    text = f"<<{written}>>"
    left = redact(text, [key])
    assert not written or "[redacted]" in left
    # Around it there may be quotes, and what they are escaped with.
    rest = left.replace("[redacted]", "")
    assert set(rest) <= set("<>'\"\\b&quot;#x27http://a.invalid?k=") | set("[redacted]")


@settings(max_examples=60)
@given(key=st.binary(min_size=12, max_size=40).map(lambda data: data.hex()), before=st.binary())
def test_base64_of_a_header_hides_no_key(key, before):
    encoded = base64.b64encode(before + b":" + key.encode() + b":after").decode()
    start, end = (len(before) + 1) * 4 // 3, (len(before) + 1 + len(key)) * 4 // 3
    head, found, tail = redact(f"Basic {encoded}", [key]).partition("[redacted]")
    assert found
    # Of the characters that it shares with its neighbours, some bits stay.
    assert len(head) <= len("Basic ") + start + 2
    assert len(tail) <= len(encoded) - end + 2


@pytest.mark.parametrize("key", ["test", "EMPTY", "dummy", "not-needed", "No-Key-Required"])
def test_a_short_word_or_a_dummy_is_not_a_secret(key):
    text = f"{key}s, {key.lower()} and un{key}ed"
    assert redact(text, [key]) == text


@pytest.mark.parametrize("key", ["x", "ab", "k/y"])
def test_a_very_short_key_is_found_as_a_bearer_token(key):
    assert redact(f"x ab k/y Bearer {key}, Bearer {key}z", [key]) == (
        f"x ab k/y Bearer [redacted], Bearer {key}z"
    )


@pytest.mark.parametrize("write", [json.dumps, repr, lambda text: json.dumps(json.dumps(text))])
def test_a_very_short_key_is_found_behind_escapes(write):
    text = "Bearer k\"'"
    assert redact(write(text), ["k\"'"]) == write(text.replace("k\"'", "[redacted]"))


def test_a_key_within_another_one_leaves_nothing_of_it():
    assert redact("abc/d and abc/d/efg", ["abc/d", "abc/d/efg"]) == "[redacted] and [redacted]"
    assert redact(r"abc\/d\/efg", ["abc/d", "abc/d/efg"]) == "[redacted]"


def test_text_of_backslashes_is_searched_in_no_time():
    text = "\\" * 200_000
    assert redact(text, ["'key'"]) == text


def test_many_keys_that_become_the_same_are_all_kept():
    value = {f"{n} sk-secret": n for n in range(5)} | {"sk-secret": 5}
    clean = Redactor(["sk-secret", *(f"{n} sk-secret" for n in range(5))]).value(value)
    assert clean == {f"[redacted] ({n + 1})" if n else "[redacted]": n for n in range(6)}


@given(
    cuts=st.lists(st.integers(0, 60), max_size=8),
    text=st.lists(st.sampled_from(["a", "\n", "\xff", KEY_OF_STREAM]), max_size=20),
)
def test_a_stream_is_redacted_wherever_it_is_cut(cuts, text):
    data = "".join(text).encode("latin-1")
    stream = RedactedStream([KEY_OF_STREAM])
    pieces = [data[a:b] for a, b in pairwise([0, *sorted(cuts), len(data)]) if a <= b]
    written = b"".join(map(stream.feed, pieces)) + stream.rest()
    assert written == data.replace(KEY_OF_STREAM.encode(), b"[redacted]")


def test_a_line_without_end_is_redacted_too():
    stream = RedactedStream([KEY_OF_STREAM])
    data = b"x" * 65_530 + KEY_OF_STREAM.encode() + b"x" * 70_000
    written = [stream.feed(data[at : at + 7_000]) for at in range(0, len(data), 7_000)]
    assert any(written)
    whole = b"".join(written) + stream.rest()
    assert whole == data.replace(KEY_OF_STREAM.encode(), b"[redacted]")


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("http://user:secret@host:81/v1?api_key=secret#secret", "http://host:81/v1"),
        ("https://secret@host/v1", "https://host/v1"),
        ("http://a@secret:b@host/v1", "http://host/v1"),
        ("http://host/v1/", "http://host/v1/"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("http://user:secret@[::1/v1", "[malformed URL]"),
    ],
)
def test_what_is_shown_of_a_url(url, public):
    assert public_url(url) == public


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("http://host:81/v1", []),
        (
            "http://user:pa%40ssword@host/v1",
            ["user:pa%40ssword@", "user:pa@ssword", "pa%40ssword", "pa@ssword"],
        ),
        ("http://long-token@host/v1", ["long-token@", "long-token"]),
        ("http://user@host/v1", ["user@"]),
        ("http://user:test@host/v1", ["user:test@", "user:test"]),
        (
            "http://host/v1?version=2024-05-01&api_key=long%2Bkey",
            ["version=2024-05-01&api_key=long%2Bkey", "long+key"],
        ),
        ("http://host/v1#sig=abcdefgh", ["sig=abcdefgh", "abcdefgh"]),
        ("http://host/v1?key=abc", ["key=abc"]),
        ("http://host/v1?k=long-value", ["k=long-value", "long-value"]),
        ("http://user:secret@[::1/v1", ["http://user:secret@[::1/v1"]),
    ],
)
def test_what_is_secret_in_a_url(url, secrets):
    assert url_secrets(url) == secrets


def test_secrets_of_the_environment_are_those_of_each_rollout(monkeypatch):
    assert list(environment_secrets({})) == []
    monkeypatch.setenv("ROLLOUT_SECRETS", "OWN_KEY, OTHER_KEY,UNSET_KEY,")
    monkeypatch.setenv("OWN_KEY", "first line\nsecond line")
    monkeypatch.setenv("OTHER_KEY", "other-value")
    monkeypatch.delenv("UNSET_KEY", raising=False)
    found = ["first line\nsecond line", "first line", "second line", "other-value"]
    assert list(environment_secrets()) == found
    url = "http://127.0.0.1:9/v1"
    assert RolloutContext(chat_completions_url=url, api_key="key").secrets == ["key", *found]
    request = RolloutInitRequest(
        rollout_id="a", initial_messages=[], chat_completions_url=url, llm_api_key="key"
    )
    assert request.secrets == ["key", None, *found]
