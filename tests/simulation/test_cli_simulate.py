"""``rollout simulate``: what it prints, how it ends, and the processes that do the work."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.harness import Cli, command_line, environment
from rich.console import Console

import rollout.cli.simulate
import rollout.simulation.run
from rollout.cli import terminal
from rollout.cli.failures import CommandError
from rollout.cli.options import processors
from rollout.cli.seeds import Recipe, SeedOutcome, run_seed, run_seeds
from rollout.cli.simulate import FAULTS, _LiveProgress, _Tally
from rollout.cli.text import echo_lines
from rollout.simulation import Fault, SimulationStats, Violation, simulate_workload

SMALL = ("--rollouts", "4")


@pytest.fixture
def cli() -> Cli:
    return Cli()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds are simulated where tests can break things."""

    def run(seeds, recipe, *, workers):
        assert 1 <= workers <= len(seeds)
        for seed in seeds:
            yield run_seed(seed, recipe)

    monkeypatch.setattr(rollout.cli.simulate, "run_seeds", run)


def breaks(monkeypatch: pytest.MonkeyPatch, *bad_seeds: int, times: int = 1) -> None:
    """Let an invariant fail in the runs with these seeds."""
    honest = rollout.simulation.run.simulate_workload
    bad = False

    def check(trace, options, workload=()):
        story = trace.story("r1")[:3]
        message = "the moon is full"
        found = Violation(invariant="slots", rollout_id="r1", message=message, story=story)
        return [found] * times if bad else []

    def simulate(seed, **options):
        nonlocal bad
        bad = seed in bad_seeds
        return honest(seed, **options)

    monkeypatch.setattr(rollout.simulation.run, "check_trace", check)
    monkeypatch.setattr(rollout.simulation, "simulate_workload", simulate)


def raises(monkeypatch: pytest.MonkeyPatch, bad_seed: int, error: BaseException) -> None:
    honest = rollout.simulation.run.simulate_workload

    def simulate(seed, **options):
        if seed == bad_seed:
            raise error
        return honest(seed, **options)

    monkeypatch.setattr(rollout.simulation, "simulate_workload", simulate)


def expected(seeds: range, **options) -> SimulationStats:
    total = SimulationStats()
    for seed in seeds:
        total += simulate_workload(seed, **options).stats
    return total


# --- many seeds -------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_seeds(cli, in_this_process):
    args = ("--first-seed", "5", "--seeds", "4", "--faults", "harsh", *SMALL, "--json")
    done = cli("simulate", *args)
    printed = json.loads(done.stdout)
    want = expected(range(5, 9), rollouts=4, faults="harsh")
    assert want.faults.total() > 0
    assert (done.exit_code, done.stderr) == (0, "")
    assert printed.pop("wall_sec") > 0
    assert printed.pop("rollouts_per_sec") > 0
    assert printed.pop("processes") == min(4, processors())
    assert printed == {
        "seeds": 4,
        "first_seed": 5,
        "faults": "harsh",
        "rollouts_per_seed": 4,
        "workers": None,
        "rollouts": 16,
        "requests": want.requests,
        "injected": dict(want.faults),
        "simulated_hours": pytest.approx(want.simulated_sec / 3600),
        "violations": 0,
        "errors": 0,
        "first_bad": None,
    }


def test_the_table_has_the_same_figures(cli, in_this_process):
    done = cli("simulate", "--seeds", "3", "--faults", "harsh", *SMALL)
    want = expected(range(3), rollouts=4, faults="harsh")
    rows = dict(re.findall(r"│ (.+?) +│ +(\S.*?) │", done.stdout))
    assert done.exit_code == 0
    assert "4 rollouts a seed, harsh faults" in done.stdout
    assert {"elapsed", "simulated", "rollouts per second"} <= rows.keys()
    for name, value in {
        "seeds": 3,
        "rollouts": 12,
        "requests": want.requests,
        "violations": 0,
        **want.faults,
    }.items():
        assert rows[name] == f"{value:,}"


def test_a_pool_is_simulated_and_replayed(cli, in_this_process, monkeypatch):
    done = cli("simulate", "--seeds", "2", "--workers", "2", *SMALL, "--json")
    printed = json.loads(done.stdout)
    want = expected(range(2), rollouts=4, workers=2)
    assert (printed["workers"], printed["requests"]) == (2, want.requests)
    assert (printed["rollouts"], printed["violations"], printed["errors"]) == (8, 0, 0)
    raises(monkeypatch, 1, RuntimeError("broken"))
    done = cli("simulate", "--seeds", "2", "--workers", "2", *SMALL)
    assert "rollout simulate --seed 1 --faults mild --rollouts 4 --workers 2" in done.stderr


def test_every_fault_is_explained(cli):
    kinds = {*Fault, "paused", "server-crashed", "cut-off", "drained"} - {Fault.NONE}
    assert set(FAULTS) == kinds
    told = cli("simulate", "--help").stdout
    assert all(re.search(rf"\n +{kind} +\S.*", told) for kind in kinds)


def test_a_terminals_lines_break_between_words(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    echo_lines("  one two three four five\nshort\n" + "long" * 10)
    assert capsys.readouterr().out.splitlines() == [
        "  one two three four",
        "      five",
        "short",
        "long" * 10,
    ]


def test_a_hundred_seeds_with_mild_faults_are_the_default(cli, monkeypatch):
    asked = []

    def run(seeds, recipe, *, workers):
        asked.append((seeds, recipe, workers))
        yield from ()

    monkeypatch.setattr(rollout.cli.simulate, "run_seeds", run)
    assert cli("simulate").exit_code == 0
    assert cli("simulate", "--seeds", "2", "--processes", "7").exit_code == 0
    assert asked == [
        (range(100), Recipe("mild", 20), min(100, processors())),
        (range(2), Recipe("mild", 20), 2),
    ]


def test_planned_failures_stay_off_stderr(tmp_path):
    done = subprocess.run(
        command_line(
            *("simulate", "--seeds", "4", "--processes", "2", "--faults", "harsh", *SMALL, "--json")
        ),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    printed = json.loads(done.stdout)
    want = expected(range(4), rollouts=4, faults="harsh")
    assert done.stderr == ""
    assert printed["processes"] == 2
    assert (printed["requests"], printed["injected"]) == (want.requests, dict(want.faults))
    assert list(tmp_path.iterdir()) == []


# --- a bad seed -------------------------------------------------------------------------------


def test_the_first_bad_seed_is_told_with_its_story_and_its_replay(
    cli, in_this_process, monkeypatch
):
    breaks(monkeypatch, 2, 3)
    done = cli("simulate", "--seeds", "5", "--faults", "harsh", *SMALL)
    replay = "rollout simulate --seed 2 --faults harsh --rollouts 4"
    assert done.exit_code == 1
    assert done.stderr == f"rollout: seed 2 violates slots; replay it: {replay}\n"
    assert done.stdout.count("the moon is full") == 1
    trace = simulate_workload(2, rollouts=4, faults="harsh").trace
    story = [str(event) for event in trace.story("r1")[:3]]
    told = done.stdout.partition("the moon is full")[2].splitlines()[1:4]
    assert [line.strip() for line in told] == [line.strip() for line in story]
    assert re.search(r"│ seeds +│ +5 │", done.stdout)
    assert re.search(r"│ violations +│ +2 │", done.stdout)


def test_what_replays_a_bad_seed_shows_the_same(cli, in_this_process, monkeypatch):
    breaks(monkeypatch, 2)
    first = json.loads(cli("simulate", "--seeds", "3", *SMALL, "--json").stdout)
    command = first["first_bad"]["replay"].split()
    assert command[:2] == ["rollout", "simulate"]
    again = json.loads(cli(*command[1:], "--json").stdout)
    assert again["first_bad"] == first["first_bad"]
    (violation,) = again["first_bad"]["violations"]
    assert (violation["invariant"], violation["rollout_id"]) == ("slots", "r1")
    assert violation["message"] == "the moon is full"
    assert violation["story"][0] in again["trace"]
    assert first["violations"] == again["violations"] == 1


def test_of_many_violations_a_few_are_told(cli, in_this_process, monkeypatch):
    breaks(monkeypatch, 1, times=8)
    done = cli("simulate", "--seeds", "2", *SMALL)
    assert done.stdout.count("the moon is full") == 3
    assert "The replay shows 5 more of seed 1." in done.stdout
    assert cli("simulate", "--seed", "1", *SMALL).stdout.count("the moon is full") == 8


def test_a_seed_that_raises_is_bad_and_ends_nothing(cli, in_this_process, monkeypatch):
    raises(monkeypatch, 1, ZeroDivisionError("by the moon"))
    done = cli("simulate", "--seeds", "3", *SMALL)
    assert done.exit_code == 1
    assert done.stderr.startswith("rollout: seed 1 raises an exception; replay it: rollout sim")
    assert "Seed 1 raises:" in done.stdout
    assert "ZeroDivisionError: by the moon" in done.stdout
    assert re.search(r"│ exceptions +│ +1 │", done.stdout)
    printed = json.loads(cli("simulate", "--seeds", "3", *SMALL, "--json").stdout)
    assert (printed["seeds"], printed["rollouts"], printed["errors"]) == (3, 8, 1)
    assert "ZeroDivisionError: by the moon" in printed["first_bad"]["error"]


def test_a_replay_that_raises_says_so(cli, in_this_process, monkeypatch):
    raises(monkeypatch, 1, ZeroDivisionError("by the moon"))
    done = cli("simulate", "--seed", "1", *SMALL)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        1,
        "rollout: seed 1 raises an exception",
    )
    assert "ZeroDivisionError: by the moon" in done.stdout


# --- one seed ---------------------------------------------------------------------------------


def test_another_process_replays_a_seed_byte_for_byte():
    args = ("simulate", "--seed", "11", "--faults", "harsh", *SMALL)
    replay = subprocess.run(
        command_line(*args),
        env=environment(PYTHONHASHSEED="1"),  # this process has one of its own
        capture_output=True,
        check=True,
    )
    run = simulate_workload(11, rollouts=4, faults="harsh")
    assert replay.stdout.decode() == run.trace.render() + "\n"
    assert len(run.trace) > 20


def test_the_summary_of_a_replay_goes_to_stderr(cli, in_this_process):
    done = cli("simulate", "--seed", "3", *SMALL)
    assert done.exit_code == 0
    assert "rollouts per second" in done.stderr
    assert "rollouts per second" not in done.stdout


def test_a_replay_as_json_has_every_event(cli, in_this_process):
    printed = json.loads(cli("simulate", "--seed", "3", *SMALL, "--json").stdout)
    run = simulate_workload(3, rollouts=4)
    assert len(printed["trace"]) == len(run.trace)
    for event, plain in zip(run.trace, printed["trace"], strict=True):
        assert plain["time"] == event.time
        assert (plain["who"], plain["what"]) == (event.who, event.what)
        assert plain["rollout_id"] == event.rollout_id
        assert plain["detail"] == event.detail
    assert (printed["seeds"], printed["first_seed"]) == (1, 3)


# --- wrong use --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--rollouts", "0"], "--rollouts"),
        (["--processes", "0"], "--processes"),
        (["--workers", "0"], "--workers"),
        (["--seed", "-1"], "--seed"),
        (["--first-seed", "-1"], "--first-seed"),
        (["--seed", "moon"], "--seed"),
        (["--faults", "some"], "'none', 'mild', 'harsh'"),
        (["--seed", "1", "--seeds", "2"], "drop --seeds"),
        (["--seed", "1", "--first-seed", "0"], "drop --first-seed"),
        (["--seed", "1", "--processes", "2"], "drop --processes"),
        (["7"], "unexpected extra argument"),
    ],
)
def test_wrong_use_is_said_in_one_line(cli, args, words):
    assert words in cli.fails(2, "simulate", *args)


# --- processes --------------------------------------------------------------------------------


def test_outcomes_come_in_the_order_of_the_seeds():
    from rollout.cli.seeds import _in_order

    handed_out = []

    def outcomes():
        for seed in (2, 0, 3, 1):
            handed_out.append(seed)
            yield SeedOutcome(seed=seed, stats=None)

    ordered = _in_order(range(4), outcomes())
    assert next(ordered).seed == 0
    assert handed_out == [2, 0]  # as soon as it may
    assert [outcome.seed for outcome in ordered] == [1, 2, 3]


def test_a_trace_stays_where_it_was_made_unless_it_is_asked_for():
    with_trace = run_seed(1, Recipe("mild", 2, keep_trace=True)).trace
    assert with_trace is not None
    assert with_trace.render() == simulate_workload(1, rollouts=2).trace.render()
    assert run_seed(1, Recipe("mild", 2)).trace is None


BROKEN = """
import multiprocessing, os, signal, sys
import rollout.simulation

honest = rollout.simulation.simulate_workload

def simulate(seed, **options):
    {body}
    return honest(seed, **options)

rollout.simulation.simulate_workload = simulate  # in every worker too: they import this file

if __name__ == "__main__":
    from rollout.cli import main
    main(prog_name="rollout")
"""


@pytest.fixture
def broken(tmp_path: Path):
    """Make a ``rollout`` whose workers do something else with a seed first."""

    def make(body: str, *args: str) -> subprocess.Popen[str]:
        script = tmp_path / "broken.py"
        script.write_text(BROKEN.format(body=body))
        return subprocess.Popen(
            [sys.executable, str(script), "simulate", "--rollouts", "2", *args],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return make


def test_a_worker_that_dies_is_told_with_its_seed(broken):
    process = broken("if seed == 3: os._exit(9)", "--seeds", "50", "--processes", "1")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors == (
        "rollout: a worker process ended with exit code 9 while it simulated seed 3; "
        "try that one alone, with --seed 3\n"
    )


def test_a_seed_that_a_worker_finds_bad_is_told(broken):
    body = "if seed in (2, 4): raise ZeroDivisionError('by the moon')"
    process = broken(body, "--seeds", "6", "--processes", "1", "--json")
    printed, _ = process.communicate()
    assert process.returncode == 1
    assert json.loads(printed)["first_bad"]["seed"] == 2
    assert json.loads(printed)["errors"] == 2


@pytest.fixture
def bell(tmp_path: Path):
    """A pipe for workers to ring, and a function that waits for that."""
    path = tmp_path / "bell"
    os.mkfifo(path)
    listening = os.open(path, os.O_RDWR)  # nobody blocks on opening the other end

    def rung() -> bool:
        return select.select([listening], [], [], 60)[0] != []

    yield path, rung
    os.close(listening)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_it_and_all_of_its_processes(broken, bell, number, code):
    path, rung = bell
    body = f"if seed == 3: open({str(path)!r}, 'w').write('x'); signal.pause()"
    process = broken(body, "--seeds", "1000000", "--processes", "2", "--json")
    assert rung()  # a worker has begun with seed 3, which never ends
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    # Ends only when nobody holds the pipes any more, so workers are gone too.
    printed, errors = process.communicate()
    assert process.returncode == code
    name = signal.Signals(number).name
    match = re.fullmatch(
        rf"rollout: interrupted by {name}; (\d) of 1000000 seeds were done\n", errors
    )
    assert match is not None, errors
    summary = json.loads(printed)
    assert summary["seeds"] == int(match[1]) <= 3
    assert summary["rollouts"] == 2 * summary["seeds"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_what_a_terminal_sends_to_all_reaches_no_worker_even_while_it_starts():
    program = """
from pathlib import Path
from rollout.cli.seeds import Recipe, _start_workers

if __name__ == "__main__":
    for worker in _start_workers(2, Recipe("none", 1)):
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        print(int(status.partition("SigBlk:")[2].split()[0], 16) >> 1 & 1)
        worker.process.kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1"]


def test_workers_end_with_a_process_that_is_killed(broken, bell):
    path, rung = bell
    body = f"if seed == 3: open({str(path)!r}, 'w').write('x')"
    process = broken(body, "--seeds", "1000000", "--processes", "2")
    assert rung()
    process.kill()
    process.communicate()  # hangs while a worker lives
    assert process.returncode == -signal.SIGKILL


def test_closing_early_ends_the_workers(monkeypatch):
    outcomes = run_seeds(range(1000), Recipe("none", 1), workers=1)
    assert next(outcomes).seed == 0
    outcomes.close()
    assert list(outcomes) == []


# --- progress ---------------------------------------------------------------------------------


def test_a_terminal_shows_how_far_it_is(monkeypatch):
    console = Console(force_terminal=True, width=100, stderr=True)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    monkeypatch.setattr(terminal, "can_draw", lambda console: console.is_terminal)
    tally = _Tally(Recipe("mild", 20), range(4), processes=1)
    with console.capture() as shown, _LiveProgress(tally, silent=False) as progress:
        tally.add(SeedOutcome(seed=0, stats=SimulationStats(runs=1, rollouts=20)))
        progress.changed()
        progress._bar.refresh()
        tally.add(SeedOutcome(seed=1, stats=None, error="boom"))
        progress.changed()
        progress._bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.get())
    assert re.search(r"seeds .* 1/4 .* rollouts/s no violations", text)
    assert re.search(r"seeds .* 2/4 .* rollouts/s 1 bad", text)


def test_no_terminal_no_bar(capsys):
    tally = _Tally(Recipe("mild", 20), range(4), processes=1)
    with _LiveProgress(tally, silent=False) as progress:
        progress.changed()
    assert capsys.readouterr() == ("", "")


def test_a_signal_is_not_mistaken_for_success():
    tally = _Tally(Recipe("mild", 20), range(4), processes=1, signal=signal.SIGTERM)
    tally.add(SeedOutcome(seed=0, stats=None, error="boom"))
    with pytest.raises(CommandError, match=r"SIGTERM; 1 of 4 .* seed 0 shows a fault: rollout "):
        tally.conclude()
