"""Workflows and graders that raise, swallow, return and mutate what they should not."""

from __future__ import annotations

import contextlib
import copy
import numbers
from typing import Any, ClassVar

import pytest
import trio
from server.faults import LLM_KEY, assert_serves, in_process_http, run
from support import Compare, Script, local_backend, make_app, prompt

from rollout import Grader, get_rollout_context
from rollout.types import AgentWorkflowOutput, RolloutSample

pytestmark = pytest.mark.usefixtures("log_lines")


class Own(BaseException):
    """What no library has heard of."""


async def _stored_cancelled() -> BaseException:
    """A Cancelled that belongs to a scope which has long been left."""
    stored: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            stored.append(error)
            raise
    return stored[0]


def _itself() -> list[Any]:
    messages: list[Any] = [{"role": "user"}]
    messages[0]["self"] = messages
    messages[0]["again"] = messages
    return messages


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Int64:
    """As NumPy's: registered, an index, and no int."""

    def __index__(self) -> int:
        return 7

    def __int__(self) -> int:
        return 7

    def __float__(self) -> float:
        return 7.0


numbers.Integral.register(Int64)


class Float32:
    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


numbers.Real.register(Float32)


class Hostile:
    """Raises whatever is asked of it."""

    def __float__(self) -> float:
        raise LookupError("no float")

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__

    def item(self) -> float:
        raise LookupError("no item")

    def __deepcopy__(self, memo: Any) -> Any:
        raise LookupError("no copy")


RAISED = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "generator exit": GeneratorExit(),
    "own": Own("boom"),
    "stop": StopAsyncIteration(),
    "group": ExceptionGroup("many", [ValueError("a"), RuntimeError("b")]),
    "base group": BaseExceptionGroup("many", [SystemExit(1), ValueError("a")]),
    "deep group": ExceptionGroup("x", [ExceptionGroup("y", [ExceptionGroup("z", [OSError(1)])])]),
    "secret": RuntimeError(f"Authorization: Bearer {LLM_KEY}"),
    "secret in a group": ExceptionGroup(LLM_KEY, [RuntimeError(LLM_KEY)]),
    "recursion": RecursionError("maximum recursion depth exceeded"),
    "memory": MemoryError(),
    "surrogate": RuntimeError("\ud800"),
    "hostile": RuntimeError(Hostile()),
}


class Raises(Script):
    async def run(self, ctx: Any) -> Any:
        await trio.lowlevel.checkpoint()
        kind = ctx.prompt[0].get("fault")
        if kind is None:
            return await super().run(ctx)
        if kind.startswith("cancelled"):
            error = await _stored_cancelled()
            if kind == "cancelled":
                raise error
            others = [ValueError("beside it")] if "beside" in kind else []
            raise BaseExceptionGroup("group", [error, *others])
        if kind == "cause":
            raise RuntimeError("outer") from ValueError(LLM_KEY)
        raise RAISED[kind]


class GraderRaises(Compare):
    async def grade(self, ctx: Any) -> None:
        kind = (ctx.metadata or {}).get("fault")
        if kind is None:
            await super().grade(ctx)
        elif kind == "cancelled":
            raise await _stored_cancelled()
        else:
            raise RAISED[kind]


@pytest.mark.parametrize(
    "kind", [*RAISED, "cancelled", "cancelled alone", "cancelled beside", "cause"]
)
async def test_whatever_a_workflow_raises_ends_its_own_rollout(kind: str):
    async with in_process_http(make_app(local_backend(Raises))) as http:
        result = await run(http, initial_messages=prompt(fault=kind))
        assert result["status"] == "failure"
        assert result["err_category"] in {"agent_error", "validation_error"}
        assert result["err_message"]
        assert result["agent_started_at"]
        assert result["sample"] is None
        await assert_serves(http)


@pytest.mark.parametrize("kind", [*RAISED, "cancelled"])
async def test_whatever_a_grader_raises_ends_its_own_rollout(kind: str):
    backend = local_backend(grader=GraderRaises)
    async with in_process_http(make_app(backend)) as http:
        result = await run(http, metadata={"fault": kind})
        assert result["status"] == "failure"
        assert result["err_category"] in {"agent_error", "validation_error"}
        assert result["sample"]["reward"] is None
        await assert_serves(http)


class Stubborn(Script):
    """Swallows its cancellation again and again, then returns something."""

    async def run(self, ctx: Any) -> Any:
        if "stubborn" not in ctx.prompt[0]:
            return await super().run(ctx)
        for _ in range(5):
            with contextlib.suppress(trio.Cancelled):
                await trio.sleep(1000)
        return [{"role": "assistant", "content": "42"}]


async def test_a_swallowed_deadline_is_still_a_timeout(autojump_clock):
    async with in_process_http(make_app(local_backend(Stubborn))) as http:
        result = await run(http, initial_messages=prompt(stubborn=True), agent_timeout_sec=5)
        assert (result["status"], result["err_category"]) == ("failure", "timeout")
        assert trio.current_time() == 5
        await assert_serves(http)


async def test_a_swallowed_cancel_request_is_still_cancelled(autojump_clock):
    from server.faults import admit, finished

    async with in_process_http(make_app(local_backend(Stubborn))) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(stubborn=True))
        await trio.sleep(1)
        await http.post("/rollout/cancel", json={"ids": [rollout_id]})
        result = await finished(http, rollout_id, headers)
        assert (result["status"], result["sample"]) == ("cancelled", None)
        assert result["agent_started_at"]
        await assert_serves(http)


class Returns(Script):
    """Returns the value that is registered under the prompt's name."""

    values: ClassVar[dict[str, Any]] = {
        "text": "42",
        "number": 42,
        "bytes": b"[]",
        "object": object(),
        "dict": {"role": "assistant", "content": "42"},
        "tuple": ({"role": "assistant"},),
        "strings": ["a", "b"],
        "nested": [[{"role": "assistant"}]],
        "generator": (x for x in ()),
        "class": RolloutSample,
        "sample": RolloutSample(messages=[]),
        "hostile": [{"content": Hostile()}],
        "object inside": [{"content": object()}],
        "bytes inside": [{"content": b"42"}],
        "set inside": [{"content": {1, 2}}],
        "NaN": [{"content": float("nan")}],
        "infinity": [{"content": float("-inf")}],
        "an endless number": [{"content": 10**5000}],
        "itself": _itself(),
        "deep": [{"content": _nested(1000)}],
        "very deep": [{"content": _nested(50_000)}],
        "a little too deep": [{"content": _nested(125)}],
        "an object as key": [{object(): 1}],
        "the same key twice": [{1: "a", "1": "b"}],
    }

    async def run(self, ctx: Any) -> Any:
        if "give" not in ctx.prompt[0]:
            return await super().run(ctx)
        return self.values[ctx.prompt[0]["give"]]


NO_MESSAGES = (
    "text", "number", "bytes", "object", "dict", "tuple", "strings", "nested", "generator",
    "class", "sample",
)  # fmt: skip


@pytest.mark.parametrize("kind", NO_MESSAGES)
async def test_what_is_no_message_list_is_a_failure_that_says_so(kind: str):
    async with in_process_http(make_app(local_backend(Returns))) as http:
        result = await run(http, initial_messages=prompt(give=kind))
        assert (result["status"], result["err_category"]) == ("failure", "validation_error")
        assert "must" in result["err_message"]
        await assert_serves(http)


@pytest.mark.parametrize("kind", [kind for kind in Returns.values if kind not in NO_MESSAGES])
async def test_a_value_without_a_json_form_costs_itself_alone(kind: str, monkeypatch):
    spoiled, *_ = Returns.values[kind]
    history = [{"role": "user", "content": 10**4299}, {**spoiled, "role": "assistant"}]
    monkeypatch.setitem(Returns.values, kind, history)
    async with in_process_http(make_app(local_backend(Returns, Always))) as http:
        result = await run(http, initial_messages=prompt(give=kind))
        assert result["status"] == "success"
        first, second = result["sample"]["messages"]
        assert first == history[0]
        assert second["role"] == "assistant"
        assert "messages[1]" in result["err_message"]
        assert result["sample"]["reward"] == 0.5
        assert "no JSON form" in result["err_message"]
    async with in_process_http(make_app(local_backend(Returns))) as http:
        await assert_serves(http)


class Always(Grader):
    async def grade(self, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()
        ctx.set_reward(0.5)


async def test_foreign_numbers_become_plain_ones(monkeypatch):
    foreign = [{"content": Int64(), "score": Float32(0.5), "tuple": (1, 2)}]
    monkeypatch.setitem(Returns.values, "foreign", foreign)
    async with in_process_http(make_app(local_backend(Returns, Always))) as http:
        result = await run(http, initial_messages=prompt(give="foreign"))
    assert result["err_message"] is None
    assert result["sample"]["messages"] == [{"content": 7, "score": 0.5, "tuple": [1, 2]}]


class Mutates(Script):
    async def run(self, ctx: Any) -> Any:
        reply = await super().run(ctx)
        ctx.prompt.clear()
        ctx.metadata["grader"] = {"raise": "mutated"}
        ctx.metadata["nested"]["list"].append(1)
        return reply


class Looks(Grader):
    seen: ClassVar[list[Any]] = []

    async def grade(self, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.seen.append(copy.deepcopy(ctx.metadata))
        ctx.metadata["nested"].clear()
        ctx.set_reward(1)


async def test_what_a_workflow_mutates_its_grader_sees_and_no_other_rollout():
    metadata = {"nested": {"list": []}}
    async with in_process_http(make_app(local_backend(Mutates, Looks))) as http:
        Looks.seen.clear()
        result = await run(http, metadata=metadata)
        assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)
        assert result["sample"]["messages"][0]["content"] == "What is 6 * 7?"
        again = await run(http, metadata=metadata)
        assert again["sample"] == result["sample"]
        assert Looks.seen == [{"nested": {"list": [1]}, "grader": {"raise": "mutated"}}] * 2


class Smuggles(Grader):
    """Puts something into the reward's slot behind the back of its converter."""

    rewards: ClassVar[dict[str, Any]] = {
        "text": "1.0",
        "list": [1.0],
        "object": object(),
        "NaN": float("nan"),
        "infinity": float("inf"),
        "complex": 1j,
        "hostile": Hostile(),
        "int64": Int64(),
        "float32": Float32(0.25),
        "bool": True,
    }

    async def grade(self, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()
        object.__setattr__(ctx.sample, "reward", self.rewards[ctx.metadata["reward"]])


@pytest.mark.parametrize("kind", Smuggles.rewards)
async def test_a_smuggled_reward_is_a_number_or_a_failure(kind: str):
    numeric = {"int64": 7.0, "float32": 0.25, "bool": 1.0}
    async with in_process_http(make_app(local_backend(grader=Smuggles))) as http:
        result = await run(http, metadata={"reward": kind})
        if kind in numeric:
            assert (result["status"], result["sample"]["reward"]) == ("success", numeric[kind])
        else:
            assert (result["status"], result["err_category"]) == ("failure", "validation_error")
            assert "reward" in result["err_message"]
            assert result["sample"]["reward"] is None


class Sets(Grader):
    async def grade(self, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()
        how = ctx.metadata["how"]
        if how == "NaN":
            ctx.set_reward(float("nan"))
        elif how == "text":
            ctx.set_reward("1.0")
        elif how == "remove":
            ctx.set_reward(1.0)
            ctx.sample.remove_sample = True
        elif how == "remove only":
            ctx.sample.remove_sample = True
        elif how == "no sample":
            ctx.sample = None
        elif how == "another sample":
            ctx.sample = {"reward": 1.0}
        elif how == "slots":
            for name in ("messages", "metrics", "label", "remove_sample", "extra_fields"):
                object.__setattr__(ctx.sample, name, Hostile())
            ctx.set_reward(1.0)
        elif how == "measures":
            ctx.set_reward(1.0)
            ctx.sample.metrics = {"good": Int64(), "bad": float("nan"), "worse": Hostile()}
            ctx.sample.extra_fields = {"list": [1, object()], 7: "seven", None: 1}


@pytest.mark.parametrize("how", ["NaN", "text", "nothing", "no sample", "another sample"])
async def test_a_grader_that_sets_no_proper_reward_is_a_failure(how: str):
    async with in_process_http(make_app(local_backend(grader=Sets))) as http:
        result = await run(http, metadata={"how": how})
        assert (result["status"], result["err_category"]) == ("failure", "validation_error")
        assert result["sample"]["reward"] is None


@pytest.mark.parametrize("how", ["remove", "remove only"])
async def test_a_removed_sample_is_a_success_without_a_reward(how: str):
    async with in_process_http(make_app(local_backend(grader=Sets))) as http:
        result = await run(http, metadata={"how": how})
        assert result["status"] == "success"
        assert result["sample"]["remove_sample"] is True
        assert result["sample"]["reward"] is None


async def test_measurements_without_a_json_form_cost_one_warning_and_no_reward(log_lines):
    async with in_process_http(make_app(local_backend(grader=Sets))) as http:
        result = await run(http, metadata={"how": "measures"})
    assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)
    assert result["sample"]["metrics"] == {"good": 7}
    assert result["sample"]["extra_fields"] == {"list": [1], "7": "seven"}
    (warning,) = [line for line in log_lines if "left out" in line]
    for what in ("metrics.bad", "metrics.worse", "extra_fields.list[1]", "NoneType"):
        assert what in warning


class Measures(Script):
    """Hands back a metric that came out of a division by nothing."""

    async def run(self, ctx: Any) -> AgentWorkflowOutput:
        await trio.lowlevel.checkpoint()
        answer = {"role": "assistant", "content": "42"}
        metrics = {"turns": 3, "loss": float("nan"), "worst": float("-inf")}
        return AgentWorkflowOutput(messages=[*ctx.prompt, answer], metrics=metrics)


async def test_a_measurement_of_a_workflow_that_is_no_number_costs_no_reward(log_lines):
    async with in_process_http(make_app(local_backend(Measures, grader=Compare))) as http:
        result = await run(http, label="42")
    assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)
    assert result["sample"]["metrics"] == {"turns": 3}
    (warning,) = [line for line in log_lines if "left out" in line]
    assert "metrics.loss" in warning
    assert "metrics.worst" in warning


async def test_a_sample_full_of_nonsense_ends_its_own_rollout():
    async with in_process_http(make_app(local_backend(grader=Sets))) as http:
        result = await run(http, metadata={"how": "slots"})
        assert result["status"] in {"success", "failure"}
        assert result["agent_started_at"]
        response = await http.get("/health")
        assert response.json()["lifecycle"]["active_rollouts"] == 0


class ReturnsNothing(Script):
    async def run(self, ctx: Any) -> Any:
        await trio.lowlevel.checkpoint()
        context = get_rollout_context()
        assert context is not None
        kind = ctx.prompt[0].get("source")
        if kind is not None:
            context.set_sample_source(_Source(kind))
        return AgentWorkflowOutput() if kind is None else None


class _Source:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def get_sample(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self.kind == "raises":
            raise RuntimeError("no sample today")
        return [{"role": "assistant"}]


@pytest.mark.parametrize("source", [None, "raises", "returns a list"])
async def test_without_a_sample_there_is_nothing_to_grade(source: str | None):
    messages = prompt() if source is None else prompt(source=source)
    async with in_process_http(make_app(local_backend(ReturnsNothing))) as http:
        result = await run(http, initial_messages=messages)
        assert result["status"] == "failure"
        assert result["sample"] is None
        result = await run(http, initial_messages=messages, grade=False)
        assert result["status"] == ("success" if source is None else "failure")
        assert result["sample"] is None
