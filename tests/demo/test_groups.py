"""What surrounds a real model in the demo: tool calls, groups of samples, plans, options."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from cli.harness import Cli
from hypothesis import given
from hypothesis import strategies as st

from rollout.demo import DemoPlan
from rollout.demo.arithmetic import ScriptedModel, last_number, make_sums
from rollout.demo.model import RealModel
from rollout.demo.report import Groups
from rollout.demo.server import PREAMBLE, RESPONSE_FORMAT, answer_of, as_tool_call
from rollout.errors import InvalidFieldError


@pytest.fixture
def cli() -> Cli:
    return Cli()


# --- tool calls -----------------------------------------------------------------------------


@given(st.integers(0, 99), st.sampled_from([None, 2]))
def test_a_call_becomes_a_tool_call(number, indent):
    message = as_tool_call(json.dumps({"tool": "answer", "number": number}, indent=indent))
    (call,) = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", None)
    assert (call["type"], call["function"]["name"]) == ("function", "answer")
    assert json.loads(call["function"]["arguments"]) == {"number": number}
    assert answer_of(message) == str(number)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "The answer is 7.",
        '{"tool": "answer", "number": 1',
        '{"tool": "answer", "number": "7"}',
        '{"tool": "answer", "number": 7.5}',
        '{"tool": "answer", "number": true}',
        '{"tool": "answer", "number": NaN}',
        '{"tool": "other", "number": 7}',
        '{"number": 7}',
        "[7]",
        "7",
        "\ud800",
    ],
)
def test_anything_else_stays_text_and_is_no_answer(reply):
    message = as_tool_call(reply)
    assert message == {"role": "assistant", "content": reply}
    assert answer_of(message) is None


@given(st.text())
def test_any_text_makes_a_message(reply):
    assert as_tool_call(reply)["role"] == "assistant"


def test_the_example_has_the_form_that_the_schema_asks_for():
    shown = PREAMBLE[-1]["content"]
    assert answer_of(as_tool_call(shown)) == "4"
    assert PREAMBLE[0]["content"].endswith('{"tool": "answer", "number": 12}')
    schema = RESPONSE_FORMAT["json_schema"]["schema"]
    assert set(json.loads(shown)) == set(schema["required"]) == set(schema["properties"])


# --- groups ---------------------------------------------------------------------------------


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_groups_count_what_a_count_by_hand_does(rewards):
    groups = Groups(3)
    for question, samples in enumerate(rewards):
        for passed in samples:
            groups.add(question, 1.0 if passed else 0.0)
    assert groups.mixed == sum(len(set(samples)) == 2 for samples in rewards)
    for estimate in groups.pass_at_k():
        choices = [any(c) for samples in rewards for c in combinations(samples, estimate.k)]
        assert estimate.value == pytest.approx(sum(choices) / len(choices))
    assert groups.to_dict()["questions"] == len(rewards)


# --- plans ----------------------------------------------------------------------------------


@given(st.integers())
def test_sums_have_single_digits_and_right_answers(seed):
    sums = make_sums(20, seed)
    assert make_sums(30, seed)[:20] == sums
    for problem in sums:
        left, right = (int(each) for each in problem.question[8:-1].split(" + "))
        assert 1 <= left <= 9
        assert 1 <= right <= 9
        assert problem.answer == str(left + right)


@pytest.mark.parametrize("model", [ScriptedModel(seed=4), RealModel(weights=Path("x"), seed=4)])
def test_samples_of_a_question_differ_in_their_seeds_alone(model):
    plan = DemoPlan(rollouts=12, samples_per_question=4, model=model)
    samples = list(plan.samples())
    assert samples == list(plan.samples())
    assert [(s.question, s.sample) for s in samples] == [(q, n) for q in range(3) for n in range(4)]
    assert len({sample.problem for sample in samples}) == 3
    assert len({sample.seed for sample in samples}) == 12
    assert all(isinstance(sample.seed, int) for sample in samples)


def test_single_samples_of_the_script_have_no_seed():
    assert {sample.seed for sample in DemoPlan(rollouts=5).samples()} == {None}


def test_rollouts_are_a_multiple_of_the_samples(cli):
    with pytest.raises(InvalidFieldError, match="a multiple of the 3 samples"):
        DemoPlan(rollouts=32, samples_per_question=3)
    assert "a multiple of the 3 samples" in cli.fails(2, "demo", "--samples-per-question", "3")


# --- the command ----------------------------------------------------------------------------


def test_groups_with_the_script(cli):
    options = ("--rollouts", "12", "--samples-per-question", "4", "--error-rate", "0.5")
    done = cli("demo", *options, "--think-sec", "0", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    model = ScriptedModel(error_rate=0.5)
    plan = DemoPlan(rollouts=12, samples_per_question=4, model=model)
    right = [
        last_number(model.answer(s.problem.question, s.seed)) == s.problem.answer
        for s in plan.samples()
    ]
    assert 0 < sum(right) < 12
    assert figures["pass_at_k"]["1"] == pytest.approx(sum(right) / 12)
    assert (figures["questions"], figures["model"]) == (3, "scripted-arithmetic")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--temperature", "1"], "--temperature does nothing with --model scripted-arithmetic"),
        (
            ["--model", "smollm2", "--error-rate", "0"],
            "--error-rate does nothing with --model smollm2",
        ),
        (
            ["--model", "smollm2", "--think-sec", "0"],
            "--think-sec does nothing with --model smollm2",
        ),
        (
            ["--model", "smollm2", "--serve-chat", "--seed", "1"],
            "--seed does nothing with --serve-chat and --model smollm2",
        ),
        (
            ["--samples-per-question", "2", "--serve-chat"],
            "--samples-per-question does nothing with --serve-chat",
        ),
    ],
)
def test_options_without_an_effect_are_refused(cli, options, line):
    assert line in cli.fails(2, "demo", *options)


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "gpt"],
        ["--samples-per-question", "0"],
        ["--model", "smollm2", "--temperature", "-1"],
        ["--model", "smollm2", "--temperature", "nan"],
    ],
)
def test_wrong_use(cli, options):
    assert cli.fails(2, "demo", *options)
