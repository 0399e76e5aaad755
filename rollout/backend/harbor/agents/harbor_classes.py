"""Harbor's own agents, wired to the chat endpoint of the rollout that they run for.

Harbor makes them by import path. They take endpoint and key out of the rollout's context, so
that the key is in no configuration, which Harbor writes to files, and in no environment
variable of this process, which all rollouts share. Needs Harbor.
"""

from __future__ import annotations

from typing import Any, ClassVar

from harbor.agents.installed.base import BaseInstalledAgent
from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.agents.installed.opencode import OpenCode
from harbor.agents.terminus_2.terminus_2 import Terminus2

from rollout.backend.harbor.agents.native import NO_KEY, chat_base
from rollout.backend.harbor.handover import current_handover
from rollout.backend.signatures import signature_of
from rollout.context import RolloutContext, get_rollout_context
from rollout.errors import BackendConfigurationError

__all__ = ["RolloutMiniSweAgent", "RolloutOpenCode", "RolloutTerminus2"]


def _context() -> RolloutContext:
    context = get_rollout_context()
    if context is None:
        raise BackendConfigurationError(
            "the agents of rollout.backend.harbor.agents.harbor_classes run within a rollout only"
        )
    return context


class RolloutTerminus2(Terminus2):  # type: ignore[misc,unused-ignore]
    """``terminus-2``, which calls the model from this process, with the rollout's key."""

    def _init_llm(self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        # Later than all that Harbor knows, so that a key in this process's environment, which
        # newer versions look up by themselves, does not stand in for the rollout's.
        own = {"api_key": _context().api_key or NO_KEY}
        return super()._init_llm(*args, llm_kwargs={**(llm_kwargs or {}), **own}, **kwargs)


class _Inside:
    """The common part of agents that call the model from inside the sandbox.

    Args:
        *args: Harbor's own arguments.
        extra_env: Environment variables, which go before those of the rollout.
        skip_install: The sandbox has the program already. Newer versions of Harbor know this
            option by themselves.
        **kwargs: Harbor's own arguments.
    """

    KEY_NAMES: ClassVar[tuple[str, ...]] = ("OPENAI_API_KEY",)

    def __init__(
        self,
        *args: Any,
        extra_env: dict[str, str] | None = None,
        skip_install: bool = False,
        **kwargs: Any,
    ) -> None:
        if "skip_install" in signature_of(BaseInstalledAgent.__init__).parameters:
            kwargs["skip_install"] = skip_install
        self._is_there = skip_install
        context = _context()
        url = chat_base(current_handover().plan.chat_url)
        wired = dict.fromkeys(self.KEY_NAMES, context.api_key or NO_KEY)
        wired |= {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url}
        env = {**wired, **(extra_env or {})}
        super().__init__(*args, extra_env=env, **kwargs)  # type: ignore[call-arg] # as below

    async def install(self, environment: Any) -> None:
        """Install the program, unless it is there."""
        if not self._is_there:
            await super().install(environment)  # type: ignore[misc] # the agent comes next


class RolloutMiniSweAgent(_Inside, MiniSweAgent):  # type: ignore[misc,unused-ignore]
    """``mini-swe-agent``, which calls the model from inside the sandbox."""

    KEY_NAMES = ("OPENAI_API_KEY", "MSWEA_API_KEY")


class RolloutOpenCode(_Inside, OpenCode):  # type: ignore[misc,unused-ignore]
    """``opencode``, which calls the model from inside the sandbox."""

    async def install(self, environment: Any) -> None:
        """Install the program, unless the image has it in the version that is asked for.

        Newer versions of Harbor look for it by themselves.
        """
        # Harbor pipes its output through stdbuf.
        command = f"command -v stdbuf >/dev/null && {{ {self.get_version_command()}; }}"
        found = await environment.exec(command=command)
        version = (found.stdout or "").strip().rpartition("\n")[2]
        if found.return_code != 0 or self._version not in {None, version} or not version:
            await super().install(environment)
