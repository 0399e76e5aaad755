"""Redaction of secrets from text, in whatever form they stand there, and the secrets in a URL."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from rollout._json.text import utf8

__all__ = [
    "SECRETS_VARIABLE",
    "RedactedStream",
    "Redactor",
    "environment_secrets",
    "is_too_short",
    "public_url",
    "redact",
    "redactor_of",
    "url_secrets",
]

SECRETS_VARIABLE = "ROLLOUT_SECRETS"
"""Names other environment variables, with commas between them, whose values are secrets."""

_REDACTED = "[redacted]"
_SHORTEST_WORD = 8
"""A shorter word is blanked out as a bearer token alone: anywhere else it would shred the text."""

_SHORTEST_OTHER = 4
"""The same of what has characters that are in no word, such as ``k=abc``."""

_DUMMIES = frozenset(
    {
        "anything",
        "changeme",
        "lm-studio",
        "no-key-needed",
        "no-key-required",
        "not-needed",
        "not-required",
        "placeholder",
        "sk-no-key-required",
        "sk-not-needed",
    }
)
"""Keys of endpoints that need none; shorter ones, such as ``EMPTY``, are too short anyway."""

_WIDEST = 48
"""So many bytes at most stand for one character of a secret."""

_LONGEST_LINE = 65_536
_LONGEST_FORM = 4_096
"""Bytes at the end of a longer line that may be the beginning of a secret."""

_PLAIN = re.compile(r"[\w.~-]+", re.ASCII)
"""What no encoding but base64 and hex changes."""

_NAMED_ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}

_SHORTEST_BASE64 = 8
_FIRST_WHOLE = (0, 2, 3)
"""Which base64 character is the first that no byte before the secret has a part in."""

_SHORTEST_IN_URL = 6
"""Characters of a secret that is looked for alone."""


class Redactor:
    """Blanks out secrets, also as `repr`, JSON, HTML, URLs, hex and base64 write them.

    Each character may be escaped in a way of its own: what was quoted twice is found too, and
    so is what a URL keeps as it is. Base64 text may hold a secret anywhere, so each way in which
    its bytes may fall into groups of three is looked for; of the characters at its ends that it
    shares with its neighbours, a few bits stay.

    Args:
        secrets: The secrets; ``None`` and empty ones are ignored. A word of less
            than eight characters is looked for after ``Bearer`` alone, and so is a well-known
            dummy such as ``not-needed``.

    """

    def __init__(self, secrets: Iterable[str | None]) -> None:
        forms: dict[str, None] = {}
        needles: set[str] = set()
        patterns: list[str] = []
        usable = dict.fromkeys(form for each in secrets if each for form in (each, each.strip()))
        for secret in filter(None, usable):
            if _is_secret(secret):
                own = dict.fromkeys(_forms(secret))
                forms |= own
                # Whatever escapes the rest leaves this as it is.
                run = max(_PLAIN.findall(secret), key=len, default="")
                needles |= {run, *(form for form in own if run not in form)}
                if not _PLAIN.fullmatch(secret):
                    patterns.append("".join(map(_escaped, utf8(secret))))
            else:
                needles.add("Bearer ")
                word = "".join(map(_escaped, utf8(secret)))
                patterns.append(rf"(?<=\bBearer ){word}(?!\w)")
        self._secrets = list(usable)
        # The longest first, so that no form is cut to pieces by a part of it.
        self._forms = sorted(forms, key=len, reverse=True)
        patterns.sort(key=len, reverse=True)
        self._pattern = re.compile("|".join(patterns)) if patterns else None
        self._needles = [needle.encode("utf-8", "surrogatepass") for needle in needles]

    def text(self, text: str) -> str:
        """Return *text* without the secrets."""
        # First with all that escapes have added, of which the plain form may be a part.
        if self._pattern is not None:
            text = self._pattern.sub(_REDACTED, text)
        for form in self._forms:
            if form in text:
                text = text.replace(form, _REDACTED)
        return text

    @cached_property
    def longest(self) -> int:
        """The largest size of a form of a secret, in bytes."""
        return _WIDEST * max(map(len, self._secrets), default=0)

    def may_hold(self, data: bytes) -> bool:
        """Whether bytes, or strings that they are the JSON of, may hold a secret; a fast check."""
        for needle in self._needles:  # noqa: SIM110 - several times as fast as a generator
            if needle in data:
                return True
        return False

    def holds(self, data: bytes) -> bool:
        """Whether bytes hold a secret."""
        return self.data(data) != data

    def data(self, data: bytes) -> bytes:
        """Return bytes without the secrets; the rest stays as it is, UTF-8 or not."""
        if not self.may_hold(data):
            return data
        text = data.decode("utf-8", "surrogateescape")
        return self.text(text).encode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """Return a JSON value with each string, keys too, as UTF-8 can say it and redacted."""
        if isinstance(value, str):
            return self.text(value if value.isascii() else utf8(value))
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            clean: dict[str, Any] = {}
            numbers: dict[str, int] = {}
            for key, item in value.items():
                name = plain = self.value(key)
                while name in clean:  # two keys may have become the same
                    numbers[plain] = numbers.get(plain, 1) + 1
                    name = f"{plain} ({numbers[plain]})"
                clean[name] = self.value(item)
            return clean
        return value


@lru_cache(maxsize=16)
def redactor_of(secrets: tuple[str | None, ...]) -> Redactor:
    """Return the redactor of these secrets, which are the same for most rollouts."""
    return Redactor(secrets)


def is_too_short(text: str) -> bool:
    """Whether a secret is blanked out as a bearer token alone, for its length."""
    return len(text) < (_SHORTEST_WORD if _PLAIN.fullmatch(text) else _SHORTEST_OTHER)


def _is_secret(text: str) -> bool:
    return not is_too_short(text) and text.lower() not in _DUMMIES


def _forms(secret: str) -> Iterator[str]:
    """List what is looked for as it stands; other escapes are left to `_escaped`."""
    plain = utf8(secret)
    data = plain.encode()
    yield from (secret, plain, data.hex(), data.hex().upper())
    for offset, first in enumerate(_FIRST_WHOLE):
        last = (offset + len(data)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            core = encode(b"\0" * offset + data)[first:last].decode("ascii")
            if len(core) >= _SHORTEST_BASE64:
                yield core


def _escaped(char: str) -> str:
    """Return a pattern for a character as it is, or as any of the common escapes writes it."""
    if _PLAIN.fullmatch(char):
        return re.escape(char)
    data = char.encode()
    pairs = char.encode("utf-16-be").hex()
    escapes = [
        "".join(f"%{byte:02x}" for byte in data),
        "".join(rf"\\{{1,8}}x{byte:02x}" for byte in data),
        "".join(rf"\\{{1,8}}u{pairs[at : at + 4]}" for at in range(0, len(pairs), 4)),
        rf"\\{{1,8}}(?:x{ord(char):02x}|U{ord(char):08x})",
        rf"&#0*{ord(char)};|&#x0*{ord(char):x};|{re.escape(html.escape(char))}",
    ]
    if char == " ":
        escapes.append(re.escape("+"))
    if char in _NAMED_ESCAPES:
        escapes.append(rf"\\{{1,8}}{_NAMED_ESCAPES[char]}")
    # Last, since the character itself may begin the others.
    escapes.append(rf"\\{{0,8}}{re.escape(char)}")
    return f"(?i:{'|'.join(escapes)})"


def environment_secrets(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the values of the variables that `SECRETS_VARIABLE` names, and each of their lines."""
    for name in environment.get(SECRETS_VARIABLE, "").split(","):
        value = environment.get(name.strip(), "")
        yield from filter(None, dict.fromkeys((value, *value.splitlines())))


class RedactedStream:
    """Redacts bytes that come in pieces, line by line, and very long lines bit by bit."""

    def __init__(self, secrets: Iterable[str | None]) -> None:
        self._redactor = Redactor(secrets)
        self._pending = b""

    def feed(self, data: bytes | bytearray) -> bytes:
        """Add bytes; return those that are complete, redacted."""
        self._pending += data
        end = self._pending.rfind(b"\n") + 1
        if not end and len(self._pending) > _LONGEST_LINE:
            self._pending = self._redactor.data(self._pending)
            end = max(len(self._pending) - _LONGEST_FORM, 0)
            whole, self._pending = self._pending[:end], self._pending[end:]
            return whole
        whole, self._pending = self._pending[:end], self._pending[end:]
        return self._redactor.data(whole)

    def rest(self) -> bytes:
        """Return the last bytes, redacted."""
        whole, self._pending = self._pending, b""
        return self._redactor.data(whole)


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """Blank out secrets in *text*; see `Redactor`."""
    return Redactor(secrets).text(text)


def public_url(url: str) -> str:
    """Return a URL without the parts that may be secret: user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "[malformed URL]"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def url_secrets(url: str) -> list[str]:
    """List the parts of a URL that must not be repeated, as HTTP errors do.

    Short ones, a user's name beside a password, and the version of an API may be words of any
    text, so they are listed within their surroundings alone.
    """
    try:
        return list(dict.fromkeys(_parts_to_hide(url)))
    except ValueError:  # not a URL, so any part of it may be secret
        return [url]


def _parts_to_hide(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    alone: list[str] = []
    login = parts.netloc.rpartition("@")[0]
    if login:
        yield f"{login}@"
        user, colon, password = login.partition(":")
        if colon:
            yield unquote(login)  # what basic authentication encodes
        secret = password if colon else user
        alone += [secret, unquote(secret)]
    for text in filter(None, (parts.query, parts.fragment)):
        yield text
        alone += [value for name, value in parse_qsl(text) if "version" not in name.lower()]
    yield from (secret for secret in alone if len(secret) >= _SHORTEST_IN_URL)
