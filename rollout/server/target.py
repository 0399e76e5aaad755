"""Which path a request target means to the router.

Routers are kind to odd targets: they skip leading slashes and put a replacement character
where a path is no UTF-8. Here such a target names nothing, so that every resource has one
name and a rollout is never polled by a path that only looks like its id.
"""

from __future__ import annotations

from urllib.parse import unquote, unquote_to_bytes, urlsplit

__all__ = ["NOWHERE", "route_path"]

NOWHERE = "/"
"""A path that no route has."""


def route_path(path: str, raw_path: bytes | None) -> str:
    """Return the path to route by, `NOWHERE` for a target that names no resource.

    Args:
        path: The percent-decoded path of the ASGI scope.
        raw_path: The path as it was sent, if the ASGI server tells.
    """
    raw = None if raw_path is None else raw_path.decode("latin-1")
    if raw is None or unquote(raw) != path:
        # Somebody between the ASGI server and the application has changed the path.
        return path if _is_plain(path) else NOWHERE
    try:
        if raw.lower().startswith(("http://", "https://")):
            raw = urlsplit(raw).path
        decoded = unquote_to_bytes(raw).decode("utf-8")
    except ValueError:
        return NOWHERE
    return decoded if _is_plain(decoded) else NOWHERE


def _is_plain(path: str) -> bool:
    return path.startswith("/") and not path.startswith("//")
