"""The forms in which a key may stand in bytes, as patterns.

A key is looked for as text in several encodings, where each unusual character may be escaped
as JSON, Python, URLs, HTML or a shell escape it, and where lines may be broken in between, as
terminals break them; and as base64 (at each way in which its bytes may fall into groups of
three, so also within the base64 of something longer) and as hexadecimal digits.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from attrs import define, field, frozen

from rollout.jsonfit import utf8

__all__ = ["SHORTEST", "Forms", "Span"]

SHORTEST = 4
"""Keys with fewer characters cannot be looked for: they are everywhere."""

_BREAKABLE = 8
"""From so many characters on, a key is found across line breaks too."""

_BACKSLASHES = 8
"""So many at a time, for JSON within JSON within JSON."""

_WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
_WIDEST = 4
_LONGEST_CHARACTER = 160
"""So many characters at most stand for one byte of a key, breaks of lines included."""

_BETWEEN = b" :,-\r\n\t"
_ESCAPE = re.compile(rb"\\[uUx]")
_ESCAPED_BREAK = re.compile(rb"(?<!\\)\\++[nrt]")
"""Looked for once in each run of backslashes: from every one of them takes for ever."""
_NARROW = ("utf-8", "latin-1", "cp1252")
_SHORT_ESCAPES = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
_SHELL = ("'\\''", "'\"'\"'")
_FIRST_WHOLE = (0, 2, 3)
"""Which base64 character is the first that no byte before the key has a part in."""

_REDACTED = "[redacted]"


@frozen
class Piece:
    """A part of a pattern.

    Attributes:
        pattern: A regular expression.
        longest: How many bytes it matches at most.
    """

    pattern: bytes
    longest: int


@frozen
class Span:
    """Where a form of a key stands.

    Attributes:
        start: The first byte.
        end: The byte behind it.
        encoding: The encoding of the form: ``ascii`` for all that have one byte a character.
    """

    start: int
    end: int
    encoding: str

    @property
    def replacement(self) -> bytes:
        """What goes into its place."""
        return _REDACTED.encode(self.encoding)


@frozen
class _Form:
    encoding: str
    find: re.Pattern[bytes]


@define
class Forms:
    """All forms of some keys.

    There are many patterns, and making them takes a while. So those that are hardly ever needed
    are made only when something cheaper has shown that they may be.

    Attributes:
        keys: The keys that can be looked for.
        longest: The length of the longest match, in bytes, or a little more.
    """

    keys: tuple[str, ...] = field(repr=False)
    longest: int = field(init=False)

    @classmethod
    def of(cls, keys: Iterable[str | None]) -> Forms:
        """Make the patterns for *keys*; ``None`` and short ones are passed over."""
        usable = dict.fromkeys(
            form for key in keys if key for form in (key, key.strip(), utf8(key))
        )
        return cls(tuple(key for key in usable if len(key) >= SHORTEST))

    def __attrs_post_init__(self) -> None:
        characters = max((len(utf8(key).encode()) for key in self.keys), default=0)
        self.longest = _WIDEST * _LONGEST_CHARACTER * characters

    def spans(self, data: bytes, origin: int = 0) -> list[Span]:
        """Return where forms of the keys stand, in order; those that overlap become one.

        Args:
            data: Where to look.
            origin: Where it begins in its file.
        """
        found = [
            Span(match.start(), match.end(), form.encoding)
            for form in self._for(data)
            for match in form.find.finditer(data)
        ]
        found.sort(key=lambda span: (span.start, -span.end))
        # A text of two bytes a character looks, a byte further on, like one of the other order.
        odd: list[Span] = []
        even: list[Span] = []
        for span in found:
            aligned = (origin + span.start) % _width(span.encoding) == 0
            (even if aligned else odd).append(span)
        return _merged(even, odd)

    def holds(self, data: bytes) -> bool:
        """Whether a form of a key stands in *data*."""
        return any(form.find.search(data) for form in self._for(data))

    def blank(self, text: bytes) -> bytes:
        """Return *text* with a placeholder in the place of each form."""
        for span in reversed(self.spans(text)):
            text = text[: span.start] + span.replacement + text[span.end :]
        return text

    # Which patterns

    def _for(self, data: bytes) -> Iterator[_Form]:
        yield from self._narrow_for(data)
        if not all(key.isascii() for key in self.keys):
            yield from self._wide
        elif b"\0" in data:
            # Without its zero bytes, such a form is one of one byte a character.
            narrowed = data.replace(b"\0", b"")
            if any(form.find.search(narrowed) for form in self._narrow_for(narrowed)):
                yield from self._wide

    def _narrow_for(self, data: bytes) -> Iterator[_Form]:
        yield from self._plain
        if b"%" in data:
            yield from self._in_urls
        if _ESCAPE.search(data):
            yield from self._in_code
        if self._squeezed_hits(data):
            yield from self._broken

    def _squeezed_hits(self, data: bytes) -> bool:
        """Whether a key, or its digits, come out when everything in between is left out."""
        squeezed = data.translate(None, _BETWEEN)
        if any(digits.search(squeezed) for digits in self._digits):
            return True
        squeezed = data.translate(None, b"\r\n\t ")
        if b"\\" in squeezed:
            squeezed = _ESCAPED_BREAK.sub(b"", squeezed)
        return len(squeezed) < len(data) and any(
            len(form.find.findall(squeezed)) > len(form.find.findall(data)) for form in self._plain
        )

    @cached_property
    def _plain(self) -> list[_Form]:
        return self._made("ascii", lambda patterns, key: patterns.plain(key, broken=False))

    @cached_property
    def _in_urls(self) -> list[_Form]:
        return self._made("ascii", lambda patterns, key: [patterns.in_url(key)])

    @cached_property
    def _in_code(self) -> list[_Form]:
        return self._made("ascii", lambda patterns, key: [patterns.in_code(key)])

    @cached_property
    def _digits(self) -> list[re.Pattern[bytes]]:
        return [
            re.compile(key.encode(charset).hex().encode(), re.IGNORECASE)
            for key in self.keys
            if _encodable(key, "utf-8")
            for charset in ("utf-8", "utf-16-le")
        ]

    @cached_property
    def _broken(self) -> list[_Form]:
        return self._made("ascii", _Patterns.broken)

    @cached_property
    def _wide(self) -> list[_Form]:
        return [form for encoding in _WIDE for form in self._made(encoding, _Patterns.all)]

    def _made(
        self, encoding: str, pieces: Callable[[_Patterns, str], Iterable[Piece]]
    ) -> list[_Form]:
        patterns = _Patterns(encoding)
        found = {piece.pattern: None for key in self.keys for piece in pieces(patterns, key)}
        return [_Form(encoding, re.compile(pattern, re.DOTALL)) for pattern in found]


def _width(encoding: str) -> int:
    return 1 if encoding == "ascii" else int(encoding[4:6]) // 8


def _merged(even: list[Span], odd: list[Span]) -> list[Span]:
    """Join spans that overlap; an odd one counts only where there is no other."""
    merged: list[Span] = []
    for span in even:
        if merged and span.start < merged[-1].end:
            last = merged.pop()
            merged.append(Span(last.start, max(last.end, span.end), last.encoding))
        else:
            merged.append(span)
    alone: list[Span] = []
    place = 0
    for span in odd:
        while place < len(merged) and merged[place].end <= span.start:
            place += 1
        taken = place < len(merged) and merged[place].start < span.end
        if not taken and not (alone and span.start < alone[-1].end):
            alone.append(span)
    return sorted((*merged, *alone), key=lambda span: span.start)


# --- patterns ---------------------------------------------------------------------------------


@frozen
class _Patterns:
    """Makes patterns for text in one encoding; ``ascii`` stands for one byte a character."""

    encoding: str

    def all(self, key: str) -> Iterator[Piece]:
        """All forms of a key."""
        yield from self.plain(key, broken=False)
        yield from self.broken(key)
        if _encodable(key, "utf-8"):
            yield self.in_url(key)
            yield self.in_code(key)

    def plain(self, key: str, *, broken: bool) -> Iterator[Piece]:
        """The key with escapes where it needs some, and its base64.

        Args:
            key: The key.
            broken: Whether lines may be broken within it.
        """
        none = Piece(b"", 0)
        breaks = self._breaks() if broken and len(key) >= _BREAKABLE else none
        # Otherwise one thing could be read in too many ways.
        between = none if re.search(r"[\s\\]", key) else breaks
        for charset in _NARROW if self.encoding == "ascii" else (self.encoding,):
            if _encodable(key, charset):
                yield self._join((self._run(run, charset) for run in _runs(key)), between)
        if _encodable(key, "utf-8"):
            for charset in ("utf-8", "utf-16-le"):
                yield from self._base64(key.encode(charset), breaks)

    def broken(self, key: str) -> Iterator[Piece]:
        """The same where lines may be broken, and hexadecimal digits."""
        yield from self.plain(key, broken=True)
        if _encodable(key, "utf-8"):
            for charset in ("utf-8", "utf-16-le"):
                yield self._hexadecimal(key.encode(charset))

    def in_url(self, key: str) -> Piece:
        """The key with each character escaped as in URLs."""
        return self._join(self._escape_url(character, "utf-8") for character in utf8(key))

    def in_code(self, key: str) -> Piece:
        """The key with each character escaped as in source code."""
        return self._join(self._escape_code(character) for character in key)

    # Characters

    def _text(self, text: str, charset: str | None = None) -> Piece:
        data = text.encode(charset or self.encoding)
        return Piece(re.escape(data), len(data))

    def _any(self, characters: Iterable[str]) -> Piece:
        return self._either(self._text(character) for character in dict.fromkeys(characters))

    def _either(self, pieces: Iterable[Piece]) -> Piece:
        choices = {piece.pattern: piece.longest for piece in pieces}
        if len(choices) == 1:
            return Piece(*next(iter(choices.items())))
        return Piece(b"(?:" + b"|".join(choices) + b")", max(choices.values()))

    def _times(self, piece: Piece, least: int, most: int) -> Piece:
        return Piece(b"(?:%b){%d,%d}" % (piece.pattern, least, most), piece.longest * most)

    def _join(self, pieces: Iterable[Piece], between: Piece | None = None) -> Piece:
        parts = list(pieces)
        joint = Piece(b"", 0) if between is None else between
        return Piece(
            joint.pattern.join(part.pattern for part in parts),
            sum(part.longest for part in parts) + joint.longest * max(len(parts) - 1, 0),
        )

    def _backslashes(self, least: int = 1) -> Piece:
        return self._times(self._text("\\"), least, _BACKSLASHES)

    def _digits(self, text: str) -> Piece:
        """Hexadecimal digits in either case."""
        return self._join(self._any((digit.lower(), digit.upper())) for digit in text)

    def _breaks(self) -> Piece:
        """What may stand between two characters where a line was broken."""
        escaped = self._join((self._backslashes(), self._any("nrt")))
        return self._times(self._either((self._any("\r\n\t "), escaped)), 0, 6)

    def _run(self, run: str, charset: str) -> Piece:
        """The pattern of one character, or of a run of backslashes."""
        if run[0] == "\\":
            escapes = (self._escape_url("\\", charset), self._escape_code("\\"))
            plain = self._times(self._text("\\"), len(run), len(run) * _BACKSLASHES)
            return self._either(
                (plain, *(self._times(escape, len(run), len(run)) for escape in escapes))
            )
        if run.isascii() and (run.isalnum() or run in "-_.~"):
            return self._text(run, charset)
        choices = [
            self._join((self._backslashes(0), self._text(run, charset))),
            self._escape_url(run, charset),
            self._escape_code(run),
        ]
        if run in _SHORT_ESCAPES:
            choices.append(self._join((self._backslashes(), self._text(_SHORT_ESCAPES[run]))))
        if run == " ":
            choices.append(self._text("+"))
        if run == "'":
            choices += [self._text(each) for each in _SHELL]
        if run in _HTML:
            choices.append(self._text(_HTML[run]))
        number = self._join((self._text(f"&#{ord(run)}"), self._text(";")))
        x = self._any("xX")
        code = self._join(
            (
                self._text("&#"),
                x,
                self._times(self._text("0"), 0, 6),
                self._digits(f"{ord(run):x}"),
                self._text(";"),
            )
        )
        return self._either((*choices, number, code))

    def _escape_url(self, character: str, charset: str) -> Piece:
        narrow = charset if charset in _NARROW else "utf-8"
        percent = self._join(
            (self._text("%"), self._times(self._text("25"), 0, 2)),
        )
        return self._join(
            self._join((percent, self._digits(f"{byte:02x}"))) for byte in character.encode(narrow)
        )

    def _escape_code(self, character: str) -> Piece:
        r"""Escapes of the kinds ``\u00e9``, ``\U000000e9``, ``\xe9`` and ``\xc3\xa9``."""
        units = character.encode("utf-16-be", "surrogatepass")
        kinds = [("u", [units[at : at + 2] for at in range(0, len(units), 2)])]
        kinds.append(("U", [ord(character).to_bytes(4, "big")]))
        data = character.encode("utf-8", "surrogatepass")
        kinds.append(("x", [bytes([byte]) for byte in data]))
        if len(data) > 1 and ord(character) < 0x100:  # noqa: PLR2004 - one byte
            kinds.append(("x", [bytes([ord(character)])]))
        # They all begin alike, which is said once: that is faster.
        return self._join(
            (
                self._backslashes(),
                self._either(
                    self._join(
                        (
                            self._join((self._text(mark), self._digits(unit.hex())))
                            for unit in parts
                        ),
                        self._backslashes(),
                    )
                    for mark, parts in kinds
                ),
            )
        )

    # Bytes

    def _base64(self, data: bytes, breaks: Piece) -> Iterator[Piece]:
        for offset, first in enumerate(_FIRST_WHOLE):
            last = (offset + len(data)) * 8 // 6
            core = base64.b64encode(b"\0" * offset + data)[first:last].decode("ascii")
            if len(core) >= SHORTEST:
                yield self._join((self._base64_character(each) for each in core), breaks)

    def _base64_character(self, character: str) -> Piece:
        if character == "+":
            return self._either((self._any("+-"), self._escape_url("+", "utf-8")))
        if character == "/":
            slash = self._join((self._backslashes(0), self._text("/")))
            return self._either((slash, self._text("_"), self._escape_url("/", "utf-8")))
        return self._text(character)

    def _hexadecimal(self, data: bytes) -> Piece:
        between = self._times(self._any(_BETWEEN.decode()), 0, 4)
        return self._join((self._digits(f"{byte:02x}") for byte in data), between)


def _runs(key: str) -> list[str]:
    r"""Split a key into its characters, but keep neighbouring backslashes together."""
    return re.findall(r"\\+|.", key, re.DOTALL)


def _encodable(key: str, charset: str) -> bool:
    try:
        key.encode(charset)
    except UnicodeEncodeError:
        return False
    return True
