"""Splits the content of a message into text and media, calls, results, thoughts, and the rest.

A part that ATIF can say becomes one of its parts. Whatever of a part it cannot say (another
kind of part, data instead of a URL, a key more) is kept beside it, under the part's place in
the list, so that nothing is lost.
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field

__all__ = ["Content", "put", "take_content"]

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_EMPTY_IN_TEXT = frozenset({"annotations", "logprobs", "citations"})

_IMAGES = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
}
_AUDIO = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "mpga": "audio/mpeg",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "ogg": "audio/ogg",
    "flac": "audio/flac",
    "weba": "audio/webm",
    "webm": "audio/webm",
    "aiff": "audio/aiff",
}
_MEDIA = {"image": _IMAGES, "audio": _AUDIO}
_MOST_UNDERSCORES = 3


@define
class Content:
    """The content of a message, by kinds of parts.

    Attributes:
        parts: ATIF parts, in their order.
        calls: Tool calls among the parts.
        results: Tool results among the parts.
        thoughts: Texts of reasoning among the parts.
        kept: Parts that ATIF cannot express completely, by their place in the list.
    """

    parts: list[dict[str, Any]] = field(factory=list)
    calls: list[dict[str, Any]] = field(factory=list)
    results: list[dict[str, Any]] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    kept: dict[str, Any] = field(factory=dict)

    @property
    def message(self) -> str | list[dict[str, Any]]:
        """The parts as ATIF wants them: a string if there is nothing but one text."""
        if not self.parts:
            return ""
        if len(self.parts) == 1 and self.parts[0]["type"] == "text":
            text: str = self.parts[0]["text"]
            return text
        return self.parts


def take_content(value: Any, *, agent: bool = False, calls: bool = False) -> Content:
    """Split the content of a message, or of a tool's result, into kinds of parts.

    Args:
        value: The content: text, parts, one part, nothing, or anything else.
        agent: Whether it is an agent's, so that calls and thoughts in it count as such.
        calls: Whether results of tools in it count as such.
    """
    content = Content()
    if value is None:
        return content
    if isinstance(value, str):
        content.parts.append({"type": "text", "text": value})
        return content
    for place, part in enumerate(value if isinstance(value, list) else [value]):
        if not _take_part(content, part, agent=agent, calls=calls):
            content.kept[str(place)] = part
    return content


def _take_part(content: Content, part: Any, *, agent: bool, calls: bool) -> bool:
    """Put one part where it belongs; return whether that expresses all of it."""
    if isinstance(part, str):
        content.parts.append({"type": "text", "text": part})
        return True
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    if agent and kind.endswith("tool_use") and isinstance(part.get("name"), str):
        content.calls.append(part)
        return True
    if calls and kind.endswith("tool_result") and "tool_use_id" in part:
        content.results.append(part)
        return True
    if agent and kind == "thinking" and isinstance(part.get("thinking"), str):
        content.thoughts.append(part["thinking"])
        return not part.keys() - {"type", "thinking"}
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        content.parts.append({"type": "text", "text": part["text"]})
        more = part.keys() - {"type", "text"}
        return not any(key not in _EMPTY_IN_TEXT or part[key] for key in more)
    which = next((name for name in _MEDIA if name in kind), None)
    if which is not None:
        return _take_media(content, part, kind, which)
    texts = [part[key] for key in ("text", "refusal") if isinstance(part.get(key), str)]
    if agent and kind == "reasoning":
        content.thoughts += texts
    else:
        content.parts += [{"type": "text", "text": text} for text in texts]
    return False


def _take_media(content: Content, part: dict[str, Any], kind: str, which: str) -> bool:
    url, said = _url(part, kind)
    media_type = _media_type(which, url, part)
    if url is None or media_type is None:
        return False
    source: dict[str, Any] = {"media_type": media_type, "path": url}
    duration = part.get("duration_sec")
    if which == "audio" and _is_duration(duration):
        source["duration_sec"] = duration
        said.add("duration_sec")
    content.parts.append({"type": which, "source": source})
    return not part.keys() - said - {"type"}


def _url(part: dict[str, Any], kind: str) -> tuple[str | None, set[str]]:
    """Find the URL in a part, and the keys that it expresses."""
    for key in (kind, "image_url", "audio_url", "source", "url"):
        value = part.get(key)
        inner = value.get("url") if isinstance(value, dict) else value
        # Data in the URL itself would be taken for the path of a file.
        if isinstance(inner, str) and "://" in inner[:40] and not inner.startswith("data:"):
            plain = not isinstance(value, dict) or value.keys() <= {"url", "type"}
            return inner, {key} if plain else set()
    return None, set()


def _media_type(which: str, url: str | None, part: dict[str, Any]) -> str | None:
    known = _MEDIA[which]
    for key in ("media_type", "mime_type"):
        if part.get(key) in known.values():
            return str(part[key])
    try:
        path = urlsplit(url or "").path
    except ValueError:
        return None
    return known.get(path.rpartition(".")[2].lower())


def _is_duration(value: Any) -> bool:
    return type(value) in {int, float} and 0 <= value < math.inf


def put(extra: dict[str, Any], name: str, value: Any) -> None:
    """Keep a value under a name, or one like it if that is taken."""
    free = name
    while free in extra and len(free) < len(name) + _MOST_UNDERSCORES:
        free += "_"
    number = len(extra)
    while free in extra:  # a step may be made of thousands of items
        free = f"{name}_{number}"
        number += 1
    extra[free] = value
