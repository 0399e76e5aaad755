"""The forms in which a key may stand in bytes, as patterns.

A key is looked for as text in several encodings, where each unusual character may be escaped
as JSON, Python, URLs, HTML or a shell escape it, and where lines may be broken in between, as
terminals break them; and as base64 (at each way in which its bytes may fall into groups of
three, so also within the base64 of something longer) and as hexadecimal digits.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from attrs import field, frozen

from rollout.jsonfit import utf8

__all__ = ["SHORTEST", "Forms", "Span"]

SHORTEST = 4
"""Keys with fewer characters cannot be looked for: they are everywhere."""

_BREAKABLE = 8
"""From so many characters on, a key is found across line breaks too."""

_BACKSLASHES = 8
"""So many at a time, for JSON within JSON within JSON."""

_WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
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


@frozen
class Forms:
    """All forms of some keys.

    Attributes:
        keys: The keys that can be looked for.
        longest: The length of the longest match, in bytes.
        plain: Whether the keys are of ASCII characters only.
    """

    keys: tuple[str, ...]
    narrow: tuple[_Form, ...] = field(repr=False)
    wide: tuple[_Form, ...] = field(repr=False)
    longest: int
    plain: bool

    @classmethod
    def of(cls, keys: Iterable[str | None]) -> Forms:
        """Make the patterns for *keys*; ``None`` and short ones are passed over."""
        usable = tuple(
            dict.fromkeys(form for key in keys if key for form in (key, key.strip(), utf8(key)))
        )
        usable = tuple(key for key in usable if len(key) >= SHORTEST)
        narrow: list[_Form] = []
        wide: list[_Form] = []
        longest = 0
        for encoding in ("ascii", *_WIDE):
            for piece in _distinct(usable, encoding):
                longest = max(longest, piece.longest)
                form = _Form(encoding, re.compile(piece.pattern, re.DOTALL))
                (narrow if encoding == "ascii" else wide).append(form)
        return cls(
            keys=usable,
            narrow=tuple(narrow),
            wide=tuple(wide),
            longest=longest,
            plain=all(key.isascii() for key in usable),
        )

    def spans(self, data: bytes) -> list[Span]:
        """Return where forms of the keys stand, in order; those that overlap become one."""
        found: list[Span] = []
        for form in (*self.narrow, *self._wide_for(data)):
            found += [
                Span(match.start(), match.end(), form.encoding)
                for match in form.find.finditer(data)
            ]
        found.sort(key=lambda span: (span.start, -span.end))
        merged: list[Span] = []
        for span in found:
            if merged and span.start < merged[-1].end:
                last = merged.pop()
                span = Span(last.start, max(last.end, span.end), last.encoding)  # noqa: PLW2901
            merged.append(span)
        return merged

    def holds(self, data: bytes) -> bool:
        """Whether a form of a key stands in *data*."""
        forms = chain(self.narrow, self._wide_for(data))
        return any(form.find.search(data) for form in forms)

    def blank(self, text: bytes) -> bytes:
        """Return *text* with a placeholder in the place of each form."""
        for span in reversed(self.spans(text)):
            text = text[: span.start] + span.replacement + text[span.end :]
        return text

    def _wide_for(self, data: bytes) -> Iterator[_Form]:
        """The forms of more than one byte a character, where there may be one."""
        if not self.plain:
            yield from self.wide
        elif b"\0" in data:
            # Without its zero bytes, such a form is one of one byte a character.
            narrowed = data.replace(b"\0", b"")
            if any(form.find.search(narrowed) for form in self.narrow):
                yield from self.wide


# --- patterns ---------------------------------------------------------------------------------


def _distinct(keys: Sequence[str], encoding: str) -> list[Piece]:
    found = {piece.pattern: piece for key in keys for piece in _Patterns(encoding).of(key)}
    return list(found.values())


@frozen
class _Patterns:
    """Makes patterns for text in one encoding; ``ascii`` stands for one byte a character."""

    encoding: str

    def of(self, key: str) -> Iterator[Piece]:
        breaks = self._breaks() if self._breakable(key) else Piece(b"", 0)
        for charset in _NARROW if self.encoding == "ascii" else (self.encoding,):
            if not _encodable(key, charset):
                continue
            yield self._join((self._run(run, charset) for run in _runs(key)), breaks)
        if not _encodable(key, "utf-8"):
            return
        yield from self._whole(key)
        breaks = self._breaks() if len(key) >= _BREAKABLE else Piece(b"", 0)
        for charset in ("utf-8", "utf-16-le", "utf-16-be"):
            data = key.encode(charset)
            yield from self._base64(data, breaks)
            yield self._hexadecimal(data, breaks)

    def _breakable(self, key: str) -> bool:
        # Otherwise one thing could be read in too many ways.
        return len(key) >= _BREAKABLE and not re.search(r"[\s\\]", key)

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
        return self._times(self._either((self._any("\r\n\t "), escaped)), 0, 10)

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

    # Wholes

    def _whole(self, key: str) -> Iterator[Piece]:
        """Forms that escape every character, whether it needs it or not."""
        yield self._join(self._escape_url(character, "utf-8") for character in key)
        yield self._join(self._escape_code(character) for character in key)

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

    def _hexadecimal(self, data: bytes, breaks: Piece) -> Piece:
        mark = self._join((self._any(" :,-"), self._times(self._text(" "), 0, 1)))
        zero = self._times(self._join((self._text("0"), self._any("xX"))), 0, 1)
        between = self._join((self._times(mark, 0, 1), breaks, zero))
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
