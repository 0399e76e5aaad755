"""Run a workflow inside a sandbox, and write its result.

`rollout.backend.harbor.inside.bootstrap` calls `main` there. The workflow runs as
`LocalBackend` would run it: an async ``run`` on trio's loop, a plain one in a worker thread,
and its sample comes from what it returned or from its sample source.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import trio

from rollout.backend.failures import (
    categorize_exception,
    describe_exception,
    format_exception,
    source_of,
)
from rollout.backend.harbor.inside.documents import (
    API_KEY,
    CHAT_URL,
    MOST_BYTES,
    WorkflowFailure,
    WorkflowResult,
    dump_result,
    load_config,
)
from rollout.backend.references import class_with
from rollout.backend.usercode import UserCall, checked_sample
from rollout.codec import parse_json
from rollout.context import AgentWorkflowContext, RolloutContext
from rollout.types import RolloutErrorCategory, RolloutSample
from rollout.types.output import coerce_output

__all__ = ["main"]


def main(payload: Path, result: Path) -> int:
    """Run the workflow of a payload and write its result, whole or not at all.

    Chat endpoint and key come by the environment, and are taken out of it, so that processes
    which the workflow starts do not inherit the key.

    Returns:
        0: a failure of the workflow is a result, too.
    """
    document = parse_json(payload.read_bytes())
    context = RolloutContext(
        chat_completions_url=os.environ.pop(CHAT_URL, ""),
        api_key=os.environ.pop(API_KEY, "") or None,
        rollout_id=document["rollout_id"],
    )
    outcome = trio.run(_run, document, context)
    data = dump_result(outcome)
    if len(data) > MOST_BYTES:
        too_large = WorkflowFailure(
            message=f"the workflow's sample is larger than {MOST_BYTES // 1024**2} MiB",
            category=RolloutErrorCategory.VALIDATION_ERROR,
        )
        data = dump_result(WorkflowResult(failure=too_large))
    unfinished = result.with_suffix(".part")
    unfinished.write_bytes(data)
    unfinished.replace(result)
    return 0


async def _run(document: dict[str, Any], context: RolloutContext) -> WorkflowResult:
    call = UserCall(context.rollout_id, "workflow")

    async def body() -> RolloutSample | None:
        workflow_cls: Any = class_with("run", document["workflow"], "workflow")
        config: Any = load_config(document["config"])
        inner: AgentWorkflowContext[Any] = AgentWorkflowContext(
            prompt=document["prompt"],
            config=config,
            metadata=document["metadata"],
            artifacts_dir=_folder(document["artifacts_dir"]),
        )
        with context:
            workflow = workflow_cls(config)
            output = coerce_output(await call.invoke(workflow.run, inner))
            if output is None:
                return checked_sample(await context.get_sample())
        if output.messages is None:
            return None
        return RolloutSample(messages=output.messages, metrics=dict(output.metrics))

    outcome = await call.run_in_task(body)
    if outcome.error is None:
        return WorkflowResult(sample=outcome.value)
    secrets = context.secrets
    traceback = format_exception(outcome.error, secrets)
    print(traceback, file=sys.stderr)  # noqa: T201 - the agent's log
    message = describe_exception(outcome.error, secrets)
    if isinstance(outcome.error, ModuleNotFoundError):
        message += (
            " (in the sandbox; have agent_options bring it with 'requirements' or 'modules', or "
            "take an image that has it)"
        )
    failed = WorkflowFailure(
        message=message,
        category=categorize_exception(outcome.error),
        source=source_of(outcome.error, context.chat_completions_url),
        traceback=traceback,
    )
    return WorkflowResult(failure=failed)


def _folder(name: str) -> Path | None:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"no folder for artifacts: {error}", file=sys.stderr)  # noqa: T201 - as above
        return None
    return folder
