"""Records the calls of an agent to its model, which become the sample of its rollout."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import datetime
from typing import Any, TypeVar

import trio

from rollout._json.fit import fit
from rollout._logs import get_logger
from rollout._redaction import Redactor
from rollout.context import RolloutContext, SampleSource, get_rollout_context
from rollout.errors import IntegrationError, InvalidFieldError, SampleSourceError
from rollout.integrations.recording.anthropic import request_messages, request_tools
from rollout.integrations.recording.calls import Answer, Call
from rollout.integrations.recording.conversations import Conversation, Conversations, Entry
from rollout.integrations.recording.responses import input_as_messages
from rollout.integrations.recording.tokens import missing_tokens, token_drift
from rollout.trajectory.build import DETAILS, with_details
from rollout.trajectory.totals import read_usage
from rollout.types import RolloutSample

__all__ = [
    "MAIN",
    "ConversationRecorder",
    "current_rollout",
    "current_rollout_on_trio",
    "get_recorder",
    "recorder_of",
]

logger = get_logger(__name__)

R = TypeVar("R", bound="ConversationRecorder")

MAIN = "main"
_MOST_PROBLEMS = 50
_MOST_BRANCHES = 100


def current_rollout_on_trio(*, threads: bool = False) -> RolloutContext:
    """Return the context of the rollout that runs here, on trio.

    Args:
        threads: Whether a worker thread of trio will do as well.

    Raises:
        IntegrationError: No rollout is running, it names no endpoint, or this is not trio.
    """
    if not trio.lowlevel.in_trio_run() and not (threads and _is_worker_thread()):
        raise IntegrationError(
            "call this from trio, not from a worker thread or asyncio code: make the workflow's "
            "run an async function, or use sync_rollout_client of rollout.integrations.openai "
            "in a thread, rollout_client of rollout.integrations.asyncio_client behind a bridge"
        )
    return current_rollout()


def _is_worker_thread() -> bool:
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return False
    return True


def current_rollout() -> RolloutContext:
    """Return the context of the rollout that runs here, on either side of the bridge.

    Raises:
        IntegrationError: No rollout is running, or it names no endpoint.
    """
    context = get_rollout_context()
    if context is None:
        raise IntegrationError(
            "no rollout is running here: call this inside of a workflow or a grader; in a test or "
            "a script, enter `with RolloutContext(chat_completions_url=..., api_key=...):` first"
        )
    if not context.chat_completions_url:
        raise IntegrationError(
            "the rollout that runs here has no chat_completions_url, so it has no model to call"
        )
    return context


def get_recorder() -> ConversationRecorder:
    """Return the recorder of the rollout that runs here; the first call registers it.

    It becomes the rollout's sample source, which is used once the workflow returns ``None``.

    Raises:
        IntegrationError: No rollout is running here.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    return recorder_of(current_rollout_on_trio(threads=True), ConversationRecorder)


def recorder_of(context: RolloutContext, kind: type[R]) -> R:
    """Return the recorder of a rollout; the first call registers it as the sample source.

    Raises:
        SampleSourceError: The rollout has a sample source of another kind.
    """
    source = context.sample_source
    if source is None and isinstance(context.gateway_source, kind):
        source = context.gateway_source
        context.set_sample_source(source)
    if isinstance(source, kind):
        return source
    if source is not None:
        raise SampleSourceError(
            f"this rollout has a sample source already ({type(source).__name__}), so its calls "
            "cannot be recorded as its sample: pass record=False to call the model unrecorded"
        )
    recorder = kind(secrets=tuple(context.secrets), info=context.info)
    context.set_sample_source(recorder)
    return recorder


class ConversationRecorder(SampleSource):
    """The sample source of a rollout whose agent calls its model through this package.

    Safe to use from any number of tasks: nothing here waits.

    Attributes:
        calls: Every request so far, in the order of sending.
        extra_fields: Your own additions to the `extra_fields` of the sample, which travel to the
            caller and are kept in the trajectory.
        info: Your own notes; they are kept in the trajectory and never travel.
        captures_tokens: Whether a gateway asks for the tokens of calls.
        model_wait_sec: How long calls have waited in a gateway before they were sent, in seconds;
            ``None`` where nothing made them wait.
    """

    captures_tokens = False
    model_wait_sec: float | None = None

    def __init__(
        self, *, secrets: tuple[str | None, ...] = (), info: dict[str, Any] | None = None
    ) -> None:
        self.calls: list[Call] = []
        self.extra_fields: dict[str, Any] = {}
        self.info: dict[str, Any] = {} if info is None else info
        self._conversations = Conversations()
        self._unrecorded: Counter[str] = Counter()
        self._redactor = Redactor(secrets)
        # Until the answer has come; then a conversation has it.
        self._sent: dict[int, list[Entry]] = {}
        self._last_unanswered: list[Entry] = []
        self._tools: list[Any] = []
        self._chosen: Conversation | None = None
        self._chosen_name = MAIN

    def __repr__(self) -> str:
        return (
            f"<ConversationRecorder: {len(self.calls)} calls, "
            f"{len(self._conversations)} conversations>"
        )

    # --- for the transport ---------------------------------------------------------------

    def start(
        self, body: dict[str, Any], *, api: str, conversation: str, at: datetime, retry: int = 0
    ) -> Call:
        """Record a request that is about to be sent.

        Args:
            body: Its body, of which copies are kept.
            api: See `Call.api`.
            conversation: The name of the conversations that it belongs to.
            at: The wall clock, in UTC.
            retry: How many times it was tried before.
        """
        if api == "responses":
            said = {name: body[name] for name in ("instructions", "input") if name in body}
            messages = input_as_messages(fit(said)[0])
            previous = body.get("previous_response_id")
            if isinstance(previous, str):
                messages = [*(self._conversations.before_response(previous) or ()), *messages]
        elif api == "messages":
            messages = request_messages(body)
        elif api == "completions":
            prompt = body.get("prompt")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
        else:
            messages = _list(body.get("messages"))
        model = body.get("model")
        offered = body.get("tools")
        tools = request_tools(offered) if api == "messages" else _list(offered)
        tools = tools or [
            {"type": "function", "function": each} for each in _list(body.get("functions"))
        ]
        if tools != self._tools:
            self._tools = fit(tools)[0]
        call = Call(
            number=len(self.calls) + 1,
            conversation=conversation,
            api=api,
            model=model if isinstance(model, str) else None,
            tools=self._tools,
            streamed=body.get("stream") is True,
            retry=retry,
            started_at=at,
        )
        self.calls.append(call)
        self._sent[call.number] = self._conversations.history(call, messages)
        return call

    def finish(self, call: Call, answer: Answer, latency_sec: float) -> None:
        """Record the answer of a call, or as much of it as there is. Only the first one counts."""
        sent = self._sent.pop(call.number, None)
        if sent is None:
            return
        call.latency_sec = latency_sec
        call.take(answer)
        if answer.error is not None:
            call.error = self._redactor.text(answer.error)
            call.outcome = "failed"
        else:
            call.outcome = "complete" if answer.complete else "interrupted"
        if call.choices:
            self._conversations.add(call, sent)
        else:
            self._last_unanswered = sent

    def note_unrecorded(self, path: str, *, warn: bool = True) -> None:
        """Count a request that is not part of a conversation.

        Args:
            path: Its route.
            warn: Whether it may have been meant to be part of one.
        """
        if warn and not self._unrecorded[path]:
            logger.warning(
                "a call of %s was not recorded: only chat completions and responses are",
                path,
            )
        self._unrecorded[path] += 1

    @property
    def revision(self) -> tuple[int, int]:
        """How many calls there were, and how many of them are under way; it never comes back."""
        return len(self.calls), len(self._sent)

    @property
    def unanswered(self) -> bool:
        """Whether there were calls, and the endpoint has answered none of them."""
        return bool(self.calls) and all(call.status_code is None for call in self.calls)

    @property
    def empty(self) -> bool:
        """Whether there were no calls."""
        return not self.calls

    # --- for users --------------------------------------------------------------------------------

    def choose(self, which: str, *, choice: int = 0) -> None:
        """Choose the conversation that is the sample, instead of the one of the last call.

        The sample follows the conversation as it goes on.

        Args:
            which: The id of a response (``reply.id``), for the conversation that it is part of;
                or the name of conversations, for the last one of these.
            choice: The index of the choice, if the response has several.

        Raises:
            InvalidFieldError: No response has that id, and no conversation that name.
        """
        found = self._conversations.with_reply(which, choice)
        if found is None and all(each.name != which for each in self._conversations):
            raise InvalidFieldError(
                "which", "must be the id of a recorded response, or the name of a conversation"
            )
        self._chosen = found
        self._chosen_name = which if found is None else found.name

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the conversation that is the sample as things stand."""
        main = self._main()
        messages = main.messages if main is not None else self._only_sent()
        return [_copied(message) for message in messages]

    def metrics(self) -> dict[str, Any]:
        """Return the totals of all calls so far, branches included.

        Tokens are left out where no answer names them.
        """
        calls = self.calls
        retries = sum(1 for call in calls if call.retry)
        failed = sum(1 for call in calls if call.outcome == "failed")
        answered = [call for call in calls if call.outcome in {"complete", "interrupted"}]
        metrics: dict[str, Any] = {
            "calls": len(calls) - retries,
            # Each retry follows one failed request, so what is left failed for good.
            "failed_calls": max(failed - retries, 0),
            "interrupted_calls": sum(1 for c in calls if c.outcome in {"interrupted", "running"}),
            "retries": retries,
            "tool_calls": sum(
                len(_list(message.get("tool_calls"))) + bool(message.get("function_call"))
                for call in answered
                for choice in call.choices
                for message in choice.messages
            ),
            "latency_sec": sum(call.latency_sec or 0.0 for call in answered),
        }
        usages = [read_usage(call.usage) for call in calls if call.usage is not None]
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            counts = [usage[name] for usage in usages if name in usage]
            if counts:
                metrics[name] = sum(counts)
        versions = [each for call in answered for each in call.policy_versions or ()]
        if versions:
            metrics["policy_version_min"] = min(versions)
            metrics["policy_version_max"] = max(versions)
        if self.model_wait_sec is not None:
            metrics["model_wait_sec"] = self.model_wait_sec
        if self.limit_reached is not None:
            metrics["limit_reached"] = self.limit_reached
        if self.captures_tokens:
            metrics["token_drift"] = len(token_drift(self._conversations))
            metrics["uncaptured_calls"] = len(self._uncaptured())
        return metrics

    async def get_sample(self) -> RolloutSample:
        """Return the sample as it stands: the conversation that counts, with all metrics."""
        await trio.lowlevel.checkpoint()
        main = self._main()
        messages = self.messages
        known = main.entries if main is not None else []
        details = [
            {name: each if name in _SHARED else _copied(each) for name, each in said.items()}
            for said in (entry.details() for entry in known)
        ] or [{} for _ in messages]
        extra = {DETAILS: details} if known else {}
        return RolloutSample(
            messages=messages,
            trajectory_messages=with_details(copy.deepcopy(messages), details),
            metrics=self.metrics(),
            extra_fields=extra | copy.deepcopy(self._extra_fields(main) | self.extra_fields),
        )

    # --- inside -----------------------------------------------------------------------------------

    def _main(self) -> Conversation | None:
        return self._chosen or self._conversations.best(self._chosen_name)

    def _only_sent(self) -> list[dict[str, Any]]:
        """Return the messages that were sent last, for a rollout without any answer."""
        sent = next(reversed(self._sent.values()), self._last_unanswered)
        return [entry.message for entry in sent]

    def _uncaptured(self) -> list[dict[str, Any]]:
        """Return the calls of which the endpoint has not sent all tokens, and what is missing."""
        complete = ((call, missing_tokens(call)) for call in self.calls if call.complete)
        return [{"call": call.number, "missing": missing} for call, missing in complete if missing]

    def _extra_fields(self, main: Conversation | None) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        branches = [
            _branch(each, main, detailed=self.captures_tokens)
            for each in self._conversations
            if main is not None and each is not main
        ]
        if branches:
            extra["branches"] = branches[-_MOST_BRANCHES:]
        last = None if main is None else main.last
        return extra | self._notes_on_calls([] if last is None else last.tools)

    def _notes_on_calls(self, tools: list[Any]) -> dict[str, Any]:
        """Return the extra fields on calls that failed or were not recorded, and on the tools."""
        notes: dict[str, Any] = {}
        problems = [call.problem() for call in self.calls if not call.complete]
        if problems:
            notes["call_problems"] = problems[-_MOST_PROBLEMS:]
        if tools:
            notes["tools"] = tools
        if self.captures_tokens:
            found = {"token_drift": token_drift(self._conversations)}
            found["uncaptured_calls"] = self._uncaptured()
            notes |= {name: turns for name, turns in found.items() if turns}
        if self._unrecorded:
            notes["unrecorded_calls"] = dict(self._unrecorded)
        return notes


def _branch(branch: Conversation, main: Conversation, *, detailed: bool) -> dict[str, Any]:
    shared = main.shared(branch.entries) if branch.name == main.name else 0
    if detailed:  # the same words again have tokens of their own
        pairs = enumerate(zip(main.entries, branch.entries[:shared], strict=False))
        shared = next((at for at, (one, own) in pairs if one.choice is not own.choice), shared)
    own = branch.entries[shared:]
    described = {
        "conversation": branch.name,
        "after": shared,
        "messages": [entry.message for entry in own],
    }
    if detailed:
        described[DETAILS] = [entry.details() for entry in own]
    return described


_SHARED = frozenset({"prompt_token_ids", "token_ids", "logprobs"})
"""Details that are not copied: they are large, and nobody changes them in place."""


def _copied(value: Any) -> Any:
    """Copy JSON."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
