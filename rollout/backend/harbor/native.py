"""Harbor's own agents, wired to the chat endpoint of the rollout that they run for.

Harbor makes them by import path. They take endpoint and key out of the rollout's context, so
that the key is in no configuration, which Harbor writes to files, and in no environment
variable of this process, which all rollouts share. Needs Harbor.
"""

from __future__ import annotations

from typing import Any

from harbor.agents.installed.mini_swe_agent import (  # type: ignore[import-not-found,unused-ignore] # pyright: ignore[reportMissingImports]
    MiniSweAgent,
)
from harbor.agents.installed.opencode import (  # type: ignore[import-not-found,unused-ignore] # pyright: ignore[reportMissingImports]
    OpenCode,
)
from harbor.agents.terminus_2.terminus_2 import (  # type: ignore[import-not-found,unused-ignore] # pyright: ignore[reportMissingImports]
    Terminus2,
)

from rollout.backend.harbor.endpoint import NO_KEY, chat_base
from rollout.context import RolloutContext, get_rollout_context
from rollout.errors import BackendConfigurationError

__all__ = ["RolloutMiniSweAgent", "RolloutOpenCode", "RolloutTerminus2"]


def _context() -> RolloutContext:
    context = get_rollout_context()
    if context is None:
        raise BackendConfigurationError(
            "the agents of rollout.backend.harbor.native run within a rollout only"
        )
    return context


def _environment(extra: dict[str, str] | None, *more_names: str) -> dict[str, str]:
    """Return what an agent inside of the sandbox finds its endpoint by."""
    context = _context()
    key, url = context.api_key or NO_KEY, chat_base(context.chat_completions_url)
    wired = {
        "OPENAI_API_KEY": key,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        **dict.fromkeys(more_names, key),
    }
    return {**wired, **(extra or {})}


class RolloutTerminus2(Terminus2):  # type: ignore[misc,unused-ignore]
    """``terminus-2``, which calls the model from this process, with the rollout's key."""

    def _init_llm(self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        # Later than all that Harbor knows, so that a key in this process's environment, which
        # newer versions look up by themselves, does not stand in for the rollout's.
        own = {"api_key": _context().api_key or NO_KEY}
        return super()._init_llm(*args, llm_kwargs={**(llm_kwargs or {}), **own}, **kwargs)


class RolloutMiniSweAgent(MiniSweAgent):  # type: ignore[misc,unused-ignore]
    """``mini-swe-agent``, which calls the model from inside of the sandbox."""

    def __init__(self, *args: Any, extra_env: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, extra_env=_environment(extra_env, "MSWEA_API_KEY"), **kwargs)


class RolloutOpenCode(OpenCode):  # type: ignore[misc,unused-ignore]
    """``opencode``, which calls the model from inside of the sandbox."""

    def __init__(self, *args: Any, extra_env: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, extra_env=_environment(extra_env), **kwargs)
