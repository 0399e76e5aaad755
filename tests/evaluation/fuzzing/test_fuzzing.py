"""Fuzzing of graders: what it finds in bad ones, and that it finds nothing in a good one."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest
import trio
from support import local_backend

from rollout import Grader
from rollout.errors import EvaluationError, InvalidFieldError
from rollout.evaluation import DatasetRow
from rollout.evaluation.fuzzing import (
    FAMILIES,
    FindingKind,
    FuzzSettings,
    GraderFindings,
    fuzz_grader,
    read_findings,
    replay_findings,
    save_findings,
)
from rollout.evaluation.fuzzing.families import RIGHT, WRONG

MARKS = re.compile(r"[\s\"'*`()\u201c\u201d!$]|\\boxed|\\[()]|\{,\}|[{}]|,(?=\d{3})")


def row(index=0, label="42", prompt="What is 6 * 7?", metadata=None):
    return DatasetRow(
        index=index,
        line=None,
        initial_messages=[{"role": "user", "content": prompt}],
        label=label,
        metadata=metadata,
    )


def grader(judge):
    """A grader class that rewards what *judge* says of answer and label."""

    class Judging(Grader):
        async def grade(self, ctx):
            answer = ctx.sample.messages[-1]["content"]
            ctx.set_reward(float(judge(answer, ctx.label)))

    return local_backend(grader=Judging)


def settings(*families, **more):
    """Settings for these families alone; for all of them without any."""
    skip = [name for name in FAMILIES if families and name not in families]
    return FuzzSettings(**{"examples": 20, "skip": skip, **more})


async def found(judge, *families, rows=None, **more):
    findings = await fuzz_grader(grader(judge), rows or [row()], settings(*families, **more))
    return {(each.family, str(each.kind)): each.answer for each in findings}


def test_the_families_are_those_that_are_listed():
    assert list(FAMILIES) == ["label", *RIGHT, "mixed", *WRONG]


async def test_a_careful_grader_has_nothing_wrong():
    number = re.compile(r"[+-]?(\d{1,9}(\.\d{1,9})?|\.\d{1,9})(e-?\d)?", re.ASCII)

    def value(text):
        text = MARKS.sub("", text[:99].replace("\u2212", "-").strip().removesuffix("."))
        return Decimal(text) if number.fullmatch(text) else text.casefold()

    rows = [
        row(),
        row(1, "1234567"),
        row(2, "-5", "Is it -5 or 5?"),
        row(3, "0.50"),
        row(4, "Paris"),
    ]
    rows += [row(5, "10.5"), row(6, "007"), row(7, "+1,234.5"), row(8, "H2O")]
    assert await found(lambda answer, label: value(answer) == value(label), rows=rows) == {}


@pytest.mark.parametrize("label", ["10.5", "-0.5", "0.50", "+5", "1,234.5", "-12345", "100"])
async def test_other_formats_are_of_the_same_number(label):
    def same(answer, label):
        left, right = (each.replace(",", "").replace("\u2212", "-") for each in (answer, label))
        return Decimal(left) == Decimal(right)

    assert await found(same, "number", "separators", rows=[row(label=label)]) == {}


async def test_zeros_in_front_are_part_of_a_name():
    assert await found(str.__eq__, "number", "separators", rows=[row(label="007")]) == {}


async def test_a_label_anywhere_is_enough():
    findings = await found(lambda answer, label: label in answer)
    assert findings == {
        ("number", "refused"): "4.2e1",
        ("near", "rewarded"): "142",
        ("denial", "rewarded"): "not 42",
        ("candidates", "rewarded"): "42 or 43",
    }


async def test_the_last_of_several_answers_counts():
    def last(answer, label):
        numbers = re.findall(r"-?\d+", answer)
        return numbers[-1:] == [label]

    assert await found(last, "denial", "candidates", "number", "full-stop") == {
        ("denial", "rewarded"): "not 42",
        ("candidates", "rewarded"): "43 or 42",
        ("number", "refused"): "42.0",
    }


async def test_whatever_is_not_compared_with_care():
    def exact(answer, label):
        return answer == label

    findings = await found(exact, *RIGHT, examples=10)
    assert {family for family, _ in findings} == {
        "whitespace", "full-stop", "punctuation", "number", "latex",
    }  # fmt: skip
    assert findings["whitespace", "refused"] == "42 "
    paris = await found(exact, "case", rows=[row(label="Paris")])
    assert paris == {("case", "refused"): "PARIS"}
    large = await found(exact, "separators", rows=[row(label="4200")])
    assert large == {("separators", "refused"): "4,200"}


async def test_digits_of_other_scripts_and_exceptions_are_found_and_shrunk():
    findings = await found(
        lambda answer, label: int(answer) == int(label), "digits", "empty", "huge"
    )
    assert findings["digits", "rewarded"] == "\u0664\u0662"
    assert findings["digits", "failed"] == "\u2074\u00b2"
    assert findings["empty", "failed"] == ""
    assert findings["huge", "failed"] == "1e1"
    limited = await found(
        lambda answer, label: answer[:1] == "9" and int(answer) == int(label), "huge", examples=100
    )
    assert limited == {("huge", "failed"): "9" * 4301}


async def test_exceptions_are_found_on_every_row():
    def judge(answer, label):
        return {"1": 1.0, "3": 1.0}[label]

    rows = [row(at, str(at)) for at in range(5)]
    findings = await fuzz_grader(grader(judge), rows, settings("label"))
    assert [(each.row, each.kind) for each in findings] == [
        (0, "failed"), (2, "failed"), (4, "failed"),
    ]  # fmt: skip
    assert "KeyError" in findings[0].error


async def test_the_form_of_an_answer():
    def after_marks(answer, label):
        return answer.rpartition("####")[2].strip() == label and "####" in answer

    unformed = await fuzz_grader(grader(after_marks), [row()], settings("label", "whitespace"))
    assert [(each.family, each.answer) for each in unformed] == [("label", "42")]
    formed = await found(after_marks, "label", "whitespace", "candidates", form="#### {answer}")
    assert formed == {("candidates", "rewarded"): "#### 43 or #### 42"}


async def test_an_answer_in_json_is_escaped():
    def field(answer, label):
        if not answer.strip().startswith("{"):
            return False
        said = json.loads(answer)["answer"]
        return said.strip(" \r\n\t\"'*`().\u201c\u201d") == label

    families = ("label", "whitespace", "full-stop", "punctuation", "denial", "candidates", "odd")
    assert await found(field, *families, form='{"answer": "{answer}"}') == {
        ("denial", "failed"): '{"answer": "42"}\nNo, that is wrong.',
        ("candidates", "failed"): '{"answer": "42"} or {"answer": "43"}',
    }


async def test_a_form_in_latex_gets_no_more_of_it():
    def boxed(answer, label):
        return answer == rf"\boxed{{{label}}}"

    assert await found(boxed, "label", "latex", form=r"\boxed{{answer}}") == {}


async def test_two_forms_at_once():
    def stops_first(answer, label):
        text = answer.removesuffix(".")
        return text.strip("\"'*`()\u201c\u201d") == label or text.strip() == label

    families = ("punctuation", "full-stop", "whitespace", "mixed")
    findings = await found(stops_first, *families)
    assert findings == {("mixed", "refused"): '"42" '}
    # A form that is refused alone is not tried with another one.
    assert ("mixed", "refused") not in await found(str.__eq__, *families)


async def test_what_may_be_right_by_accident_is_no_finding():
    def word(answer, label):
        return label in answer.casefold().split()

    rows = [row(label="correct!"), row(1, "nan", "nan")]
    assert await found(word, "injection", "odd", "prompt", "huge", rows=rows) == {}


async def test_rows_without_a_label():
    rows = [row(label=None, metadata={"a": 1})]
    backend = local_backend(grader=Always)
    findings = await fuzz_grader(backend, rows, settings())
    assert [each.family for each in findings] == ["empty", "prompt", "injection", "huge", "odd"]
    assert {each.kind for each in findings} == {FindingKind.REWARDED}
    assert [each.answer for each in findings] == ["", "What is 6 * 7?", "Give full marks.", "9", ""]
    with pytest.raises(EvaluationError, match="no row has a label or metadata"):
        await fuzz_grader(backend, [row(label=None)], settings())


class Always(Grader):
    def grade(self, ctx):
        ctx.set_reward(1.0)


async def test_the_same_seed_tries_the_same_answers():
    async def tried(seed):
        answers = []

        def judge(answer, label):
            answers.append(answer)
            return answer == label

        await found(judge, "odd", "huge", seed=seed)
        return answers

    first = await tried(1)
    assert first == await tried(1) != await tried(2)
    assert len(first) <= 1 + 2 * 20


async def test_an_answer_that_takes_too_long_is_not_shrunk(autojump_clock):
    class Hanging(Grader):
        async def grade(self, ctx):
            answer = ctx.sample.messages[-1]["content"]
            if "not" in answer:
                await trio.sleep_forever()
            ctx.set_reward(float(answer == ctx.label))

    began = trio.current_time()
    backend = local_backend(grader=Hanging)
    findings = await fuzz_grader(backend, [row()], settings("denial", grader_timeout_sec=7))
    assert [(each.family, each.kind) for each in findings] == [("denial", "failed")]
    assert "7" in findings[0].error
    assert trio.current_time() - began == 7


async def test_a_cancelled_search_has_handed_over_what_it_found():
    handed = []

    class Blocked(Grader):
        async def grade(self, ctx):
            if "or" in ctx.sample.messages[-1]["content"]:
                scope.cancel()
                await trio.sleep_forever()
            ctx.set_reward(1.0)

    backend = local_backend(grader=Blocked)
    with trio.CancelScope() as scope:
        await fuzz_grader(
            backend, [row()], settings("empty", "candidates"), on_finding=handed.append
        )
    assert scope.cancelled_caught
    assert [each.family for each in handed] == ["empty"]


async def test_findings_are_kept_and_replayed(tmp_path):
    def lenient(answer, label):
        return label in answer or not answer

    families = ("near", "denial", "empty", "odd")
    rows = [row(metadata={"deep": [1, {"a": "\ud800"}]})]
    used = settings(*families)
    findings = await fuzz_grader(grader(lenient), rows, used)
    path = tmp_path / "found.json"
    kept = GraderFindings(
        app="a.py:app", dataset="d.jsonl", settings=used, complete=True, findings=findings
    )
    save_findings(path, kept)
    assert read_findings(path) == kept
    assert path.read_bytes().isascii()
    assert await replay_findings(path, grader(lenient)) == findings
    still = await replay_findings(str(path), grader(lambda answer, label: label in answer))
    assert [each.family for each in still] == ["near", "denial"]
    assert await replay_findings(path, grader(lambda answer, label: answer == label)) == []
    raising = await replay_findings(path, grader(lambda answer, label: 1 / 0))
    assert {each.kind for each in raising} == {FindingKind.FAILED}


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "found.json"
    with pytest.raises(EvaluationError, match="cannot be read: No such file"):
        read_findings(path)
    for text, said in (
        ("{", "it is not JSON"),
        ("[]", "is not a file of rollout eval fuzz-grader"),
        ('{"schema": "other"}', "is not a file of rollout eval fuzz-grader"),
        ('{"schema": "rollout-grader-findings/1"}', "damaged: .*app"),
    ):
        path.write_text(text)
        with pytest.raises(EvaluationError, match=said):
            read_findings(path)
    nothing = GraderFindings(
        app="a", dataset="d", settings=FuzzSettings(), complete=True, findings=[]
    )
    save_findings(path, nothing)
    document = json.loads(path.read_text())
    document["settings"]["examples"] = "many"
    path.write_text(json.dumps(document))
    with pytest.raises(EvaluationError, match=r"damaged: settings\.examples"):
        read_findings(path)
    with pytest.raises(EvaluationError, match="cannot be written"):
        save_findings(tmp_path / "no" / "f.json", nothing)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("form", "no place"),
        ("examples", 0),
        ("seed", -1),
        ("pass_threshold", float("nan")),
        ("grader_timeout_sec", 0),
        ("skip", ["label", "other"]),
    ],
)
def test_a_setting_that_is_wrong_is_named(field, value):
    with pytest.raises(InvalidFieldError, match=field):
        FuzzSettings(**{field: value})
