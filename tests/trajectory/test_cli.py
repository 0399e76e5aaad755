"""``rollout trajectory show`` and ``rollout trajectory validate``."""

from __future__ import annotations

import copy
import json

import pytest
from cli.harness import Cli
from trajectory.drawn import FULL

from rollout.trajectory import build_trajectory
from rollout.types import RolloutSample

HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?\nAnd why?"},
    {
        "role": "assistant",
        "content": None,
        "model": "small",
        "reasoning_content": "A sum.",
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
        "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "2"},
    {"role": "assistant", "content": "2"},
]


@pytest.fixture
def cli():
    return Cli()


@pytest.fixture
def write(tmp_path):
    def write(document, name="t.json"):
        path = tmp_path / name
        path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
        return str(path)

    return write


def document(history=HISTORY, **options):
    return build_trajectory(history, rollout_id="r1", **options)


def test_show(cli, write):
    sample = RolloutSample(reward=1.0, label="2")
    result = cli("trajectory", "show", write(document(sample=sample)))
    assert result.exit_code == 0
    head, *steps = result.stdout.split("\n\n")
    fields = dict(line.split(None, 1) for line in head.splitlines())
    assert fields["rollout"] == "r1"
    assert fields["reward"] == "1.0"
    assert fields["label"] == "2"
    assert fields["steps"] == "4"
    assert [step.splitlines()[0] for step in steps] == [
        "1 system",
        "2 user",
        "3 agent  small  tokens: 11 in, 7 out",
        "4 agent",
    ]
    assert steps[1].splitlines()[1:] == ["  What is 1 + 1?", "  And why?"]
    assert steps[2].splitlines()[1:] == ["  ~ A sum.", '  > add {"a":1,"b":1}', "  < 2"]


def test_show_as_json(cli, write):
    result = cli("trajectory", "show", write(document()), "--json")
    assert json.loads(result.stdout) == document()
    assert len(result.stdout.splitlines()) == 1


def test_show_from_standard_input(cli):
    result = cli("trajectory", "show", "-", stdin=json.dumps(document()))
    assert "What is 1 + 1?" in result.stdout


def test_show_everything_that_there_is(cli, write):
    result = cli("trajectory", "show", write(FULL))
    assert result.exit_code == 0
    assert "[audio audio/wav s3://a]" in result.stdout


def test_escape_sequences_do_no_harm(cli, write):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r[red]"
    history = [
        {"role": "user", "content": evil, evil: evil},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": evil}, evil],
            "model": evil,
            "reasoning": evil,
            "tool_calls": [{"id": evil, "name": evil, "arguments": {evil: evil}}],
        },
        {"role": "tool", "tool_call_id": evil, "content": evil, evil: evil},
    ]
    sample = RolloutSample(label=evil, extra_fields={evil: evil})
    made = document(history, sample=sample, model_name=evil, agent_name=evil)
    result = cli("trajectory", "show", write(made))
    assert result.exit_code == 0
    assert not set(result.stdout) & set("\x1b\x07\u202e\r")
    assert "[red]" in result.stdout


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ": it is empty"),
        (b"{", ": it is not JSON: Expecting property name"),
        (b"\xff", "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "deeper"),
        (b"[]", ": trajectory: must be an object"),
        (b"{}", "trajectory.agent: is missing; rollout trajectory validate lists all 2"),
        (b'{"agent": {"name": "a", "version": "1"}}', "trajectory.steps: is missing"),
    ],
)
def test_show_what_is_no_trajectory(cli, write, content, reason):
    assert reason in cli.fails(2, "trajectory", "show", write(content))


def test_files_that_cannot_be_read(cli, tmp_path):
    assert "cannot be read" in cli.fails(2, "trajectory", "show", str(tmp_path / "none"))
    assert "cannot be read" in cli.fails(2, "trajectory", "show", str(tmp_path))
    assert "Missing argument" in cli.fails(2, "trajectory", "validate")


def test_validate(cli, write):
    one, other = write(document(), "one"), write(FULL, "other")
    result = cli("trajectory", "validate", one, other)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{one}: valid", f"{other}: valid"]


def test_validate_names_all_problems(cli, write):
    bad = copy.deepcopy(FULL)
    del bad["agent"]["name"]
    bad["steps"][0]["source"] = "critic\x1b"
    bad["steps"][1]["x\ny"] = 1
    good, broken, text = write(FULL, "good"), write(bad, "bad"), write(b"{", "text")
    result = cli("trajectory", "validate", good, broken, text)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == f"{good}: valid"
    assert lines[1] == f"{broken}: trajectory.agent.name: is missing"
    assert lines[2].startswith(f"{broken}: trajectory.steps[0].source: must be one of")
    assert lines[3] == f"{broken}: trajectory.steps[1].x y: is not a field of ATIF"
    assert lines[4].startswith(f"{text}: it is not JSON")
    assert len(lines) == 5
    assert result.stderr == "rollout: 2 of 3 files are not valid trajectories\n"


def test_validate_what_cannot_be_read(cli, write, tmp_path):
    result = cli("trajectory", "validate", str(tmp_path / "none"), write(FULL))
    assert result.exit_code == 2
    assert result.stdout.endswith(": valid\n")
    assert len(result.stderr.splitlines()) == 2
