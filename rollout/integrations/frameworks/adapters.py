"""Versions, tools and streams of asyncio frameworks, for their adapters."""

from __future__ import annotations

import importlib
import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, ParamSpec, Self, TypeVar

from attrs import define, field, frozen

from rollout._telemetry.tracing import tool_span
from rollout.errors import IntegrationError
from rollout.integrations.asyncio_bridge import AsyncioStream, get_bridge, run_in_trio

__all__ = ["AgentStream", "Framework", "stream_run", "trio_tool"]

P = ParamSpec("P")
T = TypeVar("T")


@frozen
class Framework:
    """A framework that an adapter is for.

    Attributes:
        module: The name of its module.
        distribution: The name of its distribution.
        extra: The extra of this package that brings it.
        versions: The oldest version that works, and the first one that does not.
        openai: The same for the OpenAI SDK.
    """

    module: str
    distribution: str
    extra: str
    versions: tuple[str, str]
    openai: tuple[str, str]

    def load(self, submodule: str = "") -> Any:
        """Import the framework, or a module of it.

        Raises:
            IntegrationError: It is missing, or its version or that of the OpenAI SDK is wrong.
        """
        _check(self)
        return importlib.import_module(self.module + submodule)


@cache  # looking versions up takes milliseconds
def _check(framework: Framework) -> None:
    advice = f'pip install "trio-rollout[{framework.extra}]"'
    wanted = {framework.distribution: framework.versions, "openai": framework.openai}
    for distribution, (low, high) in wanted.items():
        try:
            found = version(distribution)
        except PackageNotFoundError:
            raise IntegrationError(f"{distribution} is not installed: {advice}") from None
        if not _number(low) <= _number(found) < _number(high):
            raise IntegrationError(
                f"{distribution} {found} is installed, but {framework.module} here needs "
                f">= {low} and < {high}: {advice}, in an environment of its own if another "
                "package there wants other versions"
            )


def _number(text: str) -> tuple[int, ...]:
    """Return the release of a version as numbers, for comparisons."""
    release = re.match(r"\d+(\.\d+){0,2}", text)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def trio_tool(fn: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Make a trio function one that asyncio code awaits, with the same name and signature.

    For tools: put it below the framework's own decorator. The function runs on the trio side, with
    the context variables of its caller, and is cancelled when its caller is; see `run_in_trio`.
    """

    @wraps(fn)
    async def tool(*args: P.args, **kwargs: P.kwargs) -> T:
        with tool_span(getattr(fn, "__name__", type(fn).__name__)):
            return await run_in_trio(partial(fn, *args, **kwargs))

    return tool


@define(eq=False)
class AgentStream(Generic[T]):
    """The events of a run, as they come, for trio.

    Attributes:
        result: The result of the run, ``None`` before its end.
    """

    result: Any = None
    _events: AsyncioStream[T] = field(init=False, repr=False)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return await anext(self._events)


@asynccontextmanager
async def stream_run(
    run: Callable[[AgentStream[T]], AsyncIterable[T]], *, buffer_size: int
) -> AsyncGenerator[AgentStream[T], None]:
    """Run an agent on the bridge for the length of the block, and yield its events.

    Args:
        run: Yields the events, on the asyncio side, and sets the result of the stream.
        buffer_size: How many events the run may be ahead.
    """
    stream: AgentStream[T] = AgentStream()
    async with get_bridge().iterate(run, stream, buffer_size=buffer_size) as events:
        stream._events = events  # noqa: SLF001 - from here on it is the caller's
        yield stream
