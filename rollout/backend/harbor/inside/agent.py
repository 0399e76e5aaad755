"""The Harbor agent that runs a user's workflow inside the sandbox.

Harbor makes it by import path. `setup` brings the code in and finds a Python for it; `run`
runs the workflow there and takes its result out. Chat endpoint and key go in as environment
variables of that one command. Needs Harbor.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent

from rollout._logs import Lines, get_logger
from rollout._redaction import redact
from rollout.backend.failures import wants_tracebacks
from rollout.backend.harbor.errors import WorkflowError, WorkflowSetupError
from rollout.backend.harbor.handover import Handover, current_handover
from rollout.backend.harbor.inside.documents import API_KEY, CHAT_URL, WorkflowResult, read_result
from rollout.errors import InvalidFieldError
from rollout.types import RolloutErrorCategory

__all__ = ["SandboxAgent"]

logger = get_logger(__name__)

_PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python")
_LOGS = "/logs/agent"
_OUTPUT = f"{_LOGS}/workflow-output.txt"
_ERRORS = f"{_LOGS}/workflow-errors.txt"
_TAIL_BYTES = 2000
_KILL_SEC = 5.0

# Tries one Python after the other: each says in one line what it lacks. The first that lacks
# nothing ends it.
_FIND = """\
home=$1; shift
for python in "$@"; do
  command -v "$python" >/dev/null 2>&1 || continue
  "$python" "$home/in/bootstrap.py" check "$home" 2>/dev/null && exit 0
done
exit 1
"""


class SandboxAgent(BaseAgent):  # type: ignore[misc,unused-ignore]
    """Runs a workflow in the sandbox.

    Args:
        *args: Harbor's own arguments.
        staging: The folder that is brought in: the bootstrap script and the archive of modules.
        payload: The file that says what to run.
        result: Where the workflow's result goes on this machine.
        python: Which Python to use inside; ``None`` for the first that fits.
        **kwargs: Harbor's own arguments.
    """

    def __init__(
        self,
        *args: Any,
        staging: str,
        payload: str,
        result: str,
        python: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._staging = Path(staging)
        self._payload = Path(payload)
        self._result = Path(result)
        self._pythons = [python] if python is not None else [sys.executable, *_PYTHONS]
        self._python = ""
        self._home = ""

    @staticmethod
    def name() -> str:
        """Return what it is called in results."""
        return "rollout-workflow"

    def version(self) -> str:
        """Return this library's version."""
        return metadata.version("trio-rollout")

    # --- setup --------------------------------------------------------------------------------

    async def setup(self, environment: Any) -> None:
        """Bring the workflow in, and make sure that a Python can import what it needs.

        Raises:
            WorkflowSetupError: None can; the message says what is missing.
        """
        self._home = f"/tmp/rollout-{current_handover().plan.name}"  # noqa: S108 - in the sandbox
        home = shlex.quote(self._home)
        await self._command(environment, f"mkdir -p {home}/site {home}/out {home}/in {_LOGS}")
        await environment.upload_dir(self._staging, f"{self._home}/in")
        await environment.upload_file(self._payload, f"{self._home}/in/payload.json")
        found = await self._find(environment)
        if found is None:
            tried = ", ".join(dict.fromkeys(self._pythons))
            raise WorkflowSetupError(
                f"the sandbox has no Python from 3.11 on (tried {tried}); take an image that has "
                "one, or name it in agent_options['python']"
            )
        self._python = found["python"]
        await self._bootstrap(environment, "unpack")
        if found["missing"]:
            await self._install(environment, found["missing"])

    async def _find(self, environment: Any) -> dict[str, Any] | None:
        """Return the Python with the fewest missing packages, ``None`` if all are too old."""
        words = " ".join(map(shlex.quote, [self._home, *dict.fromkeys(self._pythons)]))
        result = await environment.exec(f"bash -c {shlex.quote(_FIND)} find {words}")
        found = []
        for line in (result.stdout or "").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                found.append(
                    {"python": str(said["python"]), "missing": list(map(str, said["missing"]))}
                )
        return min(found, key=lambda each: len(each["missing"]), default=None)

    async def _install(self, environment: Any, missing: list[str]) -> None:
        python, site = shlex.quote(self._python), shlex.quote(f"{self._home}/site")
        words = " ".join(map(shlex.quote, missing))
        result = await environment.exec(
            f"{python} -m pip install --quiet --no-input --disable-pip-version-check --retries 2 "
            f"--target {site} {words} 2>&1"
        )
        if result.return_code != 0:
            last = (result.stdout or "").strip().splitlines()[-1:] or ["it said nothing"]
            raise WorkflowSetupError(
                f"the sandbox's {self._python} lacks {', '.join(missing)}, and pip could not "
                f"install that there: {last[0]}. Take an image that has it"
            )

    async def _bootstrap(self, environment: Any, word: str) -> None:
        words = [self._python, f"{self._home}/in/bootstrap.py", word, self._home]
        await self._command(environment, " ".join(map(shlex.quote, words)))

    async def _command(self, environment: Any, command: str) -> None:
        result = await environment.exec(command)
        if result.return_code != 0:
            said = (result.stderr or result.stdout or "").strip()[-_TAIL_BYTES:]
            raise WorkflowSetupError(f"a command failed in the sandbox: {command}: {said}")

    # --- run ----------------------------------------------------------------------------------

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Run the workflow and take its result out.

        A cancellation, as at the agent's deadline, kills the workflow and what it has started.

        Args:
            instruction: The task's; the payload has the request's own messages.
            environment: Where to run.
            context: Unused: the caller of the model counts tokens.

        Raises:
            WorkflowError: The workflow failed.
        """
        del instruction, context
        handover = current_handover()
        handover.agent_failed = True
        result = await self._run(environment, handover)
        if result.failure is not None:
            failure = result.failure
            secrets = handover.plan.secrets
            said = failure.traceback if wants_tracebacks() else failure.message
            logger.error(
                "rollout %s: the workflow failed\n%s",
                handover.plan.request.id,
                Lines(redact(said, secrets)),
            )
            message = redact(failure.message, secrets)
            raise WorkflowError(message, failure.category, failure.source)
        for line in result.dropped:
            logger.warning(
                "rollout %s: left out of the sample, since it has no JSON form: %s",
                handover.plan.request.id,
                line,
            )
        handover.agent_failed = False

    async def _run(self, environment: Any, handover: Handover) -> WorkflowResult:
        context = handover.plan.context
        words = [self._python, f"{self._home}/in/bootstrap.py", "run", self._home]
        env = {
            CHAT_URL: handover.plan.chat_url,
            API_KEY: context.api_key or "",
            "PYTHONPATH": f"{self._home}/site",
            "PYTHONUNBUFFERED": "1",
        }
        command = f"exec {' '.join(map(shlex.quote, words))} >{_OUTPUT} 2>{_ERRORS} </dev/null"
        try:
            result = await environment.exec(command, env=env)
        except asyncio.CancelledError:
            await self._kill(environment)
            raise
        if result.return_code != 0:
            raise WorkflowError(await self._last_words(environment, result.return_code, handover))
        try:
            await environment.download_file(f"{self._home}/out/result.json", self._result)
            return await asyncio.to_thread(read_result, self._result)
        except (InvalidFieldError, OSError, RuntimeError) as error:
            self._result.unlink(missing_ok=True)
            raise WorkflowError(
                f"the workflow's {error}", RolloutErrorCategory.VALIDATION_ERROR
            ) from error

    async def _last_words(self, environment: Any, code: int, handover: Handover) -> str:
        result = await environment.exec(f"tail -c {_TAIL_BYTES} {_ERRORS} 2>/dev/null || true")
        said = redact((result.stdout or "").strip(), handover.plan.secrets)
        text = f"the workflow's process ended with code {code} and left no result"
        return f"{text}: {said}" if said else text

    async def _kill(self, environment: Any) -> None:
        """Kill the workflow: environments leave it running when its command is cancelled."""
        pid = shlex.quote(f"{self._home}/out/pid")
        command = f'[ -f {pid} ] && kill -KILL -- "-$(cat {pid})" 2>/dev/null; true'
        try:
            async with asyncio.timeout(_KILL_SEC):
                await environment.exec(command)
        except Exception as error:  # noqa: BLE001 - the environment is about to be stopped anyway
            logger.debug("the workflow could not be killed: %r", error)
