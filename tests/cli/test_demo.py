"""``rollout demo``: the scripted model, the figures, and the whole of it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess

import pytest
from cli.harness import command_line, environment
from hypothesis import given
from hypothesis import strategies as st

import rollout.demo.server
from rollout.cli.demo import _LiveProgress
from rollout.demo import DemoPlan, DemoReport, run_demo
from rollout.demo.arithmetic import ScriptedModel, last_number, make_problems
from rollout.errors import InvalidFieldError, RolloutServerError
from rollout.types import RolloutErrorCategory, RolloutResultResponse, RolloutSample

FAST = ("--think-sec", "0")


# --- the model ------------------------------------------------------------------------------

seeds = st.integers()


@given(seeds)
def test_makes_no_mistake_at_rate_0_and_only_mistakes_at_rate_1(seed):
    for problem in make_problems(20, seed):
        right, wrong = (
            ScriptedModel(error_rate=0, seed=seed),
            ScriptedModel(error_rate=1, seed=seed),
        )
        assert last_number(right.answer(problem.question)) == problem.answer
        assert last_number(wrong.answer(problem.question)) != problem.answer


@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_what_is_wrong_stays_wrong_at_a_higher_rate(seed, one, other):
    low, high = (ScriptedModel(seed=seed, error_rate=rate) for rate in sorted((one, other)))
    for problem in make_problems(20, seed):
        if last_number(low.answer(problem.question)) != problem.answer:
            assert high.answer(problem.question) == low.answer(problem.question)


def test_the_share_of_mistakes_is_about_the_rate():
    model = ScriptedModel(seed=1, error_rate=0.25)
    problems = make_problems(4000, 1)
    wrong = sum(last_number(model.answer(p.question)) != p.answer for p in problems)
    assert 0.2 < wrong / len(problems) < 0.3


@given(seeds, st.integers(0, 20), st.integers(0, 20))
def test_more_problems_begin_with_the_same_ones(seed, few, more):
    both = make_problems(few + more, seed)
    assert both[:few] == make_problems(few, seed)


def test_seeds_differ():
    assert make_problems(10, 0) != make_problems(10, 1)
    answers = [
        [ScriptedModel(seed=seed, error_rate=0.5).answer(f"{n} + 1") for n in range(50)]
        for seed in (0, 1)
    ]
    assert answers[0] != answers[1]


@given(st.text())
def test_any_text_gets_an_answer(text):
    assert ScriptedModel().answer(text)


@given(seeds, st.text(), st.floats(0, 1e6))
def test_thinking_time_is_around_its_mean(seed, question, mean):
    thinking = ScriptedModel(seed=seed, think_sec=mean).thinking_sec(question)
    assert 0.5 * mean <= thinking <= 1.5 * mean


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", True, None])
@pytest.mark.parametrize("name", ["error_rate", "think_sec"])
def test_model_refuses(name, value):
    with pytest.raises(InvalidFieldError, match=name):
        ScriptedModel(**{name: value})


def test_error_rate_ends_at_1():
    with pytest.raises(InvalidFieldError, match="from 0 to 1"):
        ScriptedModel(error_rate=1.1)


@pytest.mark.parametrize("name", ["rollouts", "max_in_flight"])
@pytest.mark.parametrize("value", [0, 1.5, True, None])
def test_plan_refuses(name, value):
    with pytest.raises(InvalidFieldError, match=name):
        DemoPlan(**{name: value})


# --- the figures ----------------------------------------------------------------------------


def test_percentiles_of_latencies():
    def percentile(latencies, share):
        return DemoReport(rollouts=1, latencies=latencies).latency_sec(share)

    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([float(n) for n in range(101)], 0.95) == 95.0


def result(status, reward=None, **fields):
    sample = None if reward is None else RolloutSample(reward=reward)
    return RolloutResultResponse(rollout_id="r", status=status, sample=sample, **fields)


def test_report():
    report = DemoReport(rollouts=4)
    report.add(result("success", 1.0), 1.0)
    report.add(result("success", 0.0), 3.0)
    report.add(result("cancelled", err_message="stopped"), 2.0)
    assert not report.all_succeeded
    timeout = RolloutErrorCategory.TIMEOUT
    report.add(result("failure", err_message="late", err_category=timeout), 2.0)
    report.elapsed_sec = 8.0
    assert report.to_dict() == {
        "rollouts": 4,
        "success": 2,
        "failure": 1,
        "cancelled": 1,
        "mean_reward": 0.5,
        "elapsed_sec": 8.0,
        "latency_p50_sec": 2.0,
        "latency_p95_sec": pytest.approx(2.85),
        "rollouts_per_sec": 0.5,
    }
    assert report.problems == {"stopped": 1, "timeout: late": 1}


def test_report_of_nothing():
    figures = DemoReport(rollouts=1).to_dict()
    assert (
        figures["mean_reward"] is figures["latency_p50_sec"] is figures["rollouts_per_sec"] is None
    )


# --- the whole ------------------------------------------------------------------------------


def test_a_log_that_colours_are_forced_upon_gets_no_bar(cli):
    done = cli("demo", "--rollouts", "12", *FAST, FORCE_COLOR="1")
    assert (done.exit_code, done.stderr) == (0, "")


def test_json(cli):
    done = cli("demo", "--rollouts", "12", "--seed", "5", "--error-rate", "0.5", *FAST, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    figures = json.loads(done.stdout)
    model = ScriptedModel(seed=5, error_rate=0.5)
    right = [last_number(model.answer(p.question)) == p.answer for p in make_problems(12, 5)]
    assert figures["mean_reward"] == pytest.approx(sum(right) / 12)
    assert 0 < figures["latency_p50_sec"] <= figures["latency_p95_sec"] <= figures["elapsed_sec"]
    assert figures["rollouts_per_sec"] > 0
    counts = {name: figures[name] for name in ("rollouts", "success", "failure", "cancelled")}
    assert counts == {"rollouts": 12, "success": 12, "failure": 0, "cancelled": 0}
    assert figures["max_in_flight"] == 8
    assert (figures["seed"], figures["error_rate"]) == (5, 0.5)


def test_rewards_do_not_depend_on_scheduling(cli):
    means = {
        json.loads(
            cli("demo", "--rollouts", "16", "--max-in-flight", str(n), *FAST, "--json").stdout
        )["mean_reward"]
        for n in (1, 16)
    }
    assert len(means) == 1


@pytest.mark.parametrize(("rate", "mean"), [("0", "1.000"), ("1", "0.000")])
def test_table_and_wrong_answers_are_no_failures(cli, rate, mean):
    done = cli("demo", "--rollouts", "3", "--error-rate", rate, *FAST)
    assert (done.exit_code, done.stderr) == (0, "")
    cells = [line.strip("│ ").split("│") for line in done.stdout.splitlines() if "│" in line]
    rows = {name.strip(): value.strip() for name, value in cells}
    assert rows["success"] == "3"
    assert rows["failure"] == rows["cancelled"] == "0"
    assert rows["mean reward"] == mean
    assert rows.keys() >= {"latency p50", "latency p95", "rollouts per second", "elapsed"}
    assert "a script that does sums and errs on purpose" in " ".join(done.stdout.split())


async def test_never_more_in_flight_than_asked_for():
    most = 0

    def changed(report, in_flight):
        nonlocal most
        most = max(most, in_flight.total())

    report = DemoReport(rollouts=10)
    plan = DemoPlan(rollouts=10, max_in_flight=3, model=ScriptedModel(think_sec=0))
    await run_demo(plan, report, changed)
    assert report.all_succeeded
    assert most == 3


@pytest.mark.parametrize("as_json", [True, False])
def test_failed_rollouts_are_exit_code_1(cli, monkeypatch, caplog, as_json):
    async def broken(self, ctx):
        if "-" in ctx.prompt[0]["content"]:
            raise ConnectionError("the model is away")
        return await original(self, ctx)

    original = rollout.demo.server.AskModel.run
    monkeypatch.setattr(rollout.demo.server.AskModel, "run", broken)
    minus = sum("-" in problem.question for problem in make_problems(8, 0))
    assert 0 < minus < 8
    with caplog.at_level(logging.CRITICAL):
        done = cli("demo", "--rollouts", "8", *FAST, *["--json"] * as_json)
    assert done.exit_code == 1
    assert done.stderr == (
        f"rollout: {minus} of 8 rollouts failed, most often with: agent_error: the model is away\n"
    )
    if as_json:
        assert json.loads(done.stdout)["failure"] == minus
    else:
        assert f"{minus} x agent_error: the model is away" in done.stdout


# httpx leaves its request body behind, half iterated, when a request is cancelled as it is sent.
@pytest.mark.filterwarnings("ignore:Async generator 'httpx._content:ResourceWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_word(cli, on_call, number):
    sent = []

    def interrupt(report, in_flight):
        if in_flight.total() == 8 and not sent:
            sent.append(number)
            signal.raise_signal(number)

    on_call(_LiveProgress, "changed", interrupt)
    line = cli.fails(128 + number, "demo", "--think-sec", "600")
    assert line == (
        f"rollout: interrupted by {number.name}; "
        "0 of 32 rollouts had ended, the others were cancelled"
    )


def test_a_piece_that_cannot_start_is_told_in_one_line(cli, monkeypatch):
    async def no_port(*args, **kwargs):
        raise RolloutServerError("cannot listen on 127.0.0.1:0: no free port")

    monkeypatch.setattr("rollout.demo.runner.serve", no_port)
    assert "cannot listen" in cli.fails(2, "demo", *FAST)


@pytest.mark.parametrize(
    "options",
    [
        ["--rollouts", "0"],
        ["--max-in-flight", "0"],
        ["--error-rate", "1.5"],
        ["--error-rate", "nan"],
        ["--think-sec", "-1"],
        ["--think-sec", "inf"],
        ["--seed", "x"],
    ],
)
def test_wrong_use(cli, options):
    assert cli.fails(2, "demo", *options)


def test_leaves_no_file_behind(tmp_path):
    (tmp_path / "tmp").mkdir()
    homes = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command_line("demo", "--rollouts", "4", "--json", *FAST),
        cwd=tmp_path,
        env=environment(**homes),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["success"] == 4
    assert list(tmp_path.rglob("*")) == [tmp_path / "tmp"]
