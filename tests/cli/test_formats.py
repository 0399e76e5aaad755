"""``--json`` and ``--plain``, which every command takes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import click
import pytest
from cli.harness import command_line, environment

from rollout.cli import main
from rollout.trajectory import build_trajectory


def commands(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands, with the words that call them."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, (*path, name))


ALL = dict(commands())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_takes_both(cli, path):
    names = [name for param in ALL[path].params for name in param.opts]
    assert (names.count("--json"), names.count("--plain")) == (1, 1)
    shown = cli(*path, "--help").stdout
    assert "--json" in shown
    assert "--plain" in shown


@pytest.fixture
def written(tmp_path):
    """What commands without a server can read."""
    document = build_trajectory([{"role": "user", "content": "Hello?"}], rollout_id="r")
    (tmp_path / "good.json").write_text(json.dumps(document))
    (tmp_path / "bad.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("anywhere", [False, True])
@pytest.mark.parametrize(
    ("args", "code", "names"),
    [
        (("init", "{}/project"), 0, {"folder", "template", "files"}),
        (("doctor",), None, {"check", "verdict", "text"}),
        (("trajectory", "validate", "{}/good.json", "{}/bad.json"), 1, {"file", "valid"}),
        (("trajectory", "validate", "{}/absent.json"), 2, {"file", "valid", "problems"}),
        (("trajectory", "show", "{}/good.json"), 0, {"schema_version", "steps"}),
        (("clean", "{}", "--older-than", "1d"), 0, {"folder", "rollouts", "bytes", "dry_run"}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_json_alone_is_on_stdout(cli, written, args, code, names, anywhere):
    args = [each.format(written) for each in args]
    args = ["--json", *args] if anywhere else [*args, "--json"]
    result = cli(*args)
    assert code is None or result.exit_code == code, result.output
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert objects
    assert all(names <= each.keys() for each in objects)


@pytest.mark.parametrize(
    "args",
    [
        ("doctor", "--plain"),
        ("--plain", "trajectory", "show", "{}/good.json"),
        ("trajectory", "--plain", "show", "{}/good.json"),
    ],
    ids=" ".join,
)
def test_plain_is_text_alone_whatever_the_terminal(cli, written, args):
    args = [each.format(written) for each in args]
    forced = {"FORCE_COLOR": "1", "COLUMNS": "20"}
    plain = cli(*args, **forced)
    drawn = cli(*(each for each in args if each != "--plain"), **forced)
    assert plain.exit_code == drawn.exit_code
    assert "\x1b" not in plain.stdout
    assert "\x1b" in drawn.stdout


def test_a_server_says_where_it_listens(apps):
    command = command_line("serve", "cli_apps:app", "--bind", "127.0.0.1:0", "--json")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=apps, env=environment(), stdout=pipe, stderr=pipe) as server:
        try:
            (url,) = json.loads(server.stdout.readline())["listening"]
            server.terminate()
            _, log = server.communicate(timeout=60)
        finally:
            server.kill()
    assert url.startswith("http://127.0.0.1:")
    assert server.returncode == 0
    assert all(json.loads(line)["message"] for line in log.splitlines())
