"""What the adapters of asyncio frameworks share: versions, clients, tools, streams."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, ParamSpec, Self, TypeVar

from attrs import define, field, frozen

from rollout.errors import IntegrationError
from rollout.integrations.asyncio_bridge import AsyncioStream, run_in_trio
from rollout.integrations.frameworks.source import source_of, the_rollout
from rollout.integrations.recording.recorder import MAIN
from rollout.integrations.transport.openai_client import load_sdk, make_client
from rollout.integrations.transport.recording import AsyncioTransport, Endpoint

__all__ = ["AgentStream", "Framework", "rollout_openai", "settle", "trio_tool"]

P = ParamSpec("P")
T = TypeVar("T")


@frozen
class Framework:
    """A framework that an adapter is for.

    Attributes:
        module: What is imported.
        distribution: What is installed.
        extra: The extra of this package that brings it.
        versions: The oldest version that does, and the first one that does not.
        openai: The same of the OpenAI SDK that it works with.
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
        if self not in _checked:
            self._check(self.distribution, self.versions)
            self._check("openai", self.openai)
            _checked.add(self)
        return importlib.import_module(self.module + submodule)

    def _check(self, distribution: str, versions: tuple[str, str]) -> None:
        low, high = versions
        advice = f'pip install "trio-rollout[{self.extra}]"'
        try:
            found = version(distribution)
        except PackageNotFoundError:
            raise IntegrationError(f"{distribution} is not installed: {advice}") from None
        if not _number(low) <= _number(found) < _number(high):
            raise IntegrationError(
                f"{distribution} {found} is installed, but {self.module} here needs "
                f">= {low} and < {high}: {advice}, in an environment of its own if another "
                "package there wants other versions"
            )


_checked: set[Framework] = set()
"""Whose versions are right; looking them up takes milliseconds."""


def _number(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def rollout_openai(
    *,
    record: bool,
    timeout_sec: float | None,
    max_retries: int,
    **options: Any,
) -> Any:
    """Return a client of the OpenAI SDK, for asyncio, that is bound to the rollout.

    It costs well below a millisecond; the connections belong to the loop that uses it.

    Raises:
        IntegrationError: No rollout is running here, or the SDK is not installed.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    context = the_rollout()
    load_sdk()
    endpoint = Endpoint.of(context.chat_completions_url, context.api_key)
    transport = AsyncioTransport(
        endpoint, source_of(context) if record else None, conversation=MAIN
    )
    return make_client(
        endpoint, transport, timeout_sec=timeout_sec, max_retries=max_retries, **options
    )


def trio_tool(fn: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Make a trio function one that asyncio code awaits, with the same name and signature.

    For tools: put it below the framework's own decorator. The function runs on the trio side, with
    the context variables of its caller, and is cancelled when its caller is; see `run_in_trio`.
    """

    @functools.wraps(fn)
    async def tool(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_in_trio(functools.partial(fn, *args, **kwargs))

    return tool


@define(eq=False)
class AgentStream(Generic[T]):
    """The events of a run, as they come, for trio.

    Attributes:
        result: What the run ended with, ``None`` before that.
    """

    result: Any = None
    _events: AsyncioStream[T] | None = field(default=None, repr=False)

    def attach(self, events: AsyncioStream[T]) -> Self:
        """Take where the events come from."""
        self._events = events
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        assert self._events is not None  # noqa: S101 - it is attached before anybody has it
        return await anext(self._events)


async def settle(task: asyncio.Task[Any] | None) -> None:
    """Wait until a task has ended, whatever it ends with; on the asyncio side."""
    if task is not None:
        await asyncio.wait([task])
