"""Export to a log of Inspect: a sample for each attempt, with the attempts of a row as epochs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout._version import package_version
from rollout.codec import dump_json
from rollout.errors import EvaluationError
from rollout.evaluation.export.placing import beside, check_free, place
from rollout.evaluation.export.reading import METRIC, ExportedAttempt, ExportedRun, import_extra
from rollout.evaluation.records import AttemptOutcome

__all__ = ["export_inspect"]

_SCORER = "rollout"
_UNKNOWN_MODEL = "unknown"
_IMAGES = ("data:", "http://", "https://")


def export_inspect(run: ExportedRun, target: Path, *, replace: bool) -> Path:
    """Write the attempts of a run into a log of Inspect. All of them are in memory meanwhile.

    Returns:
        The file.

    Raises:
        EvaluationError: inspect_ai is missing, or the file exists or cannot be written.
    """
    inspect = import_extra("inspect", "inspect_ai.log")
    if target.suffix != ".eval":
        raise EvaluationError(f"{target}: Inspect reads no log whose name does not end in .eval")
    check_free(target, replace=replace)
    with beside(target) as folder:
        made = folder / "log.eval"
        inspect.write_eval_log(inspect.EvalLog.model_validate(_log(run)), made, format="eval")
        place(made, target)
    return target


def _log(run: ExportedRun) -> dict[str, Any]:
    manifest = run.manifest
    model = str(manifest["chat"].get("model") or _UNKNOWN_MODEL)
    tokens: Counter[str] = Counter()
    samples: list[dict[str, Any]] = []
    for attempt in run.attempts():
        samples.append(_sample(attempt, model))
        tokens.update(_usage(attempt) or {})
    dataset = manifest["dataset"]
    created = run.began.isoformat()
    return {
        "version": 2,
        "status": "success" if run.complete else "cancelled",
        "eval": {
            "eval_id": manifest["run_id"],
            "run_id": manifest["run_id"],
            "created": created,
            "task": run.dataset,
            "task_id": run.dataset,
            "task_display_name": run.name,
            "dataset": {
                "name": run.dataset,
                "location": dataset.get("path"),
                "samples": dataset["selected"],
                "sample_ids": sorted({sample["id"] for sample in samples}),
                "shuffled": False,
            },
            "model": model,
            "model_base_url": manifest["chat"].get("url"),
            "config": {"epochs": manifest["run"]["n"]},
            "packages": {"trio-rollout": package_version()},
            "metadata": {"rollout": manifest},
            "scorers": [{"name": _SCORER}],
        },
        "plan": {"name": "rollout", "steps": [{"solver": "rollout"}]},
        "results": _results(run),
        "stats": {
            "started_at": created,
            "completed_at": run.ended.isoformat(),
            "model_usage": {model: tokens} if tokens else {},
        },
        "samples": samples,
    }


def _results(run: ExportedRun) -> dict[str, Any]:
    results, figures = run.metrics.results, run.figures()

    def score(name: str, names: list[str], scored: int) -> dict[str, Any]:
        there = [each for each in names if each in figures]
        metrics = {each: {"name": each, "value": figures[each]} for each in there}
        return {"name": name, "scorer": _SCORER, "scored_samples": scored, "metrics": metrics}

    curves = [name for name in figures if name.startswith(("pass_at_", "pass_hat_"))]
    intervals = ["pass_rate", "pass_rate_low", "pass_rate_high"]
    means = ["mean_reward", "mean_reward_low", "mean_reward_high"]
    counts = results.attempts
    return {
        "total_samples": counts.planned,
        "completed_samples": results.outcomes[AttemptOutcome.SUCCESS.value],
        "scores": [
            score("passed", [*intervals, *curves], counts.counted),
            score("reward", means, counts.rewarded),
            *(
                {
                    "name": name,
                    "scorer": _SCORER,
                    "scored_samples": count,
                    "metrics": {"mean": {"name": "mean", "value": mean}},
                }
                for name, (mean, count) in run.means().items()
            ),
        ],
    }


# --- samples ----------------------------------------------------------------------------------


def _sample(attempt: ExportedAttempt, model: str) -> dict[str, Any]:
    record, cells, messages = attempt.record, attempt.cells(), attempt.messages or []
    chat = [_message(message) for message in messages]
    prompt = list(_prompt(chat))
    usage = _usage(attempt)
    facts = ("rollout_id", "outcome", "retry", "removed", "err_category", "err_source")
    return {
        "id": record.row,
        "epoch": record.attempt + 1,
        "input": prompt,
        "target": attempt.label or "",
        "messages": chat,
        "output": _output(chat[len(prompt) :], model, usage),
        "scores": _scores(attempt),
        "metadata": {
            **(attempt.metadata or {}),
            "rollout": {name: cells[name] for name in facts} | {"earlier": len(attempt.others)},
        },
        "model_usage": {model: usage} if usage else {},
        "started_at": record.submitted_at.isoformat(),
        "completed_at": attempt.ended_at.isoformat(),
        "total_time": record.duration_sec,
        "uuid": cells["rollout_id"],
        "error": _error(cells) if _failed(cells) else None,
        "error_retries": [_error(each) for each in attempt.earlier() if _failed(each)],
    }


def _usage(attempt: ExportedAttempt) -> dict[str, int] | None:
    sent, said = attempt.record.prompt_tokens, attempt.record.completion_tokens
    if sent is None and said is None:
        return None
    sent, said = sent or 0, said or 0
    return {"input_tokens": sent, "output_tokens": said, "total_tokens": sent + said}


def _failed(facts: dict[str, Any]) -> bool:
    return AttemptOutcome(facts["outcome"]) is not AttemptOutcome.SUCCESS


def _error(facts: dict[str, Any]) -> dict[str, Any]:
    reason = facts["err_category"] or facts["outcome"]
    message = f"{reason}: {facts['err_message']}" if facts["err_message"] else reason
    if facts["outcome"] == AttemptOutcome.CANCELLED.value:
        message = f"Cancelled({message!r})"  # by which Inspect knows what was cancelled
    return {"message": message, "traceback": message, "traceback_ansi": message}


def _scores(attempt: ExportedAttempt) -> dict[str, Any] | None:
    record = attempt.record
    if record.failed or record.outcome is AttemptOutcome.CANCELLED or record.reward is None:
        return None
    answer = attempt.answer
    return {
        "passed": {"value": "C" if record.passed else "I", "answer": answer},
        "reward": {"value": float(record.reward), "answer": answer},
        **{METRIC + name: {"value": value} for name, value in attempt.metrics().items()},
    }


def _output(said: list[dict[str, Any]], model: str, usage: dict[str, int] | None) -> dict[str, Any]:
    answer = next((each for each in reversed(said) if each["role"] == "assistant"), None)
    if answer is None:
        return {"model": model, "usage": usage}
    reason = "tool_calls" if answer.get("tool_calls") else "stop"
    choices = [{"message": answer, "stop_reason": reason}]
    return {"model": model, "choices": choices, "usage": usage}


def _prompt(chat: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages before the first one of the agent."""
    for message in chat:
        if message["role"] == "assistant":
            return
        yield message


def _message(message: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message["role"], "content": _content(message)}
    if "tool_call_id" in message:
        found["tool_call_id"] = message["tool_call_id"]
    if "tool_calls" in message:
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return found


def _content(message: dict[str, Any]) -> str | list[dict[str, Any]]:
    content, thoughts = message["content"], message.get("reasoning_content")
    if isinstance(content, str) and not thoughts:
        return content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    reasoning = [{"type": "reasoning", "reasoning": thoughts}] if thoughts else []
    return [*reasoning, *map(_part, parts)]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    url = part.get("image_url", {}).get("url", "")
    if url.startswith(_IMAGES):
        return {"type": "image", "image": url}
    return {"type": "text", "text": dump_json(part).decode()}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    text = call["function"]["arguments"]
    found: dict[str, Any] = {"id": call["id"], "function": call["function"]["name"]}
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return found | {"arguments": {"arguments": text}, "parse_error": str(error)}
    if not isinstance(arguments, dict):
        return found | {"arguments": {"arguments": arguments}}
    return found | {"arguments": arguments}
