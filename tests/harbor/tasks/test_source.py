"""Which task a rollout runs, and what it is told. No Harbor is needed for that."""

from __future__ import annotations

import stat

import pytest

from rollout.backend.harbor.tasks.source import TaskSource
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.types import ExecutionRequest

PROMPT = [{"role": "user", "content": "Add two numbers."}]


def make_task(folder, config="", instruction="Do it."):
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text(instruction)
    (folder / "environment").mkdir()
    (folder / "tests").mkdir()
    script = folder / "tests" / "test.sh"
    script.write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    script.chmod(0o755)
    return folder


def request(metadata=None, prompt=PROMPT):
    return ExecutionRequest(id="r1", prompt=prompt, metadata=metadata)


@pytest.fixture
def dataset(tmp_path):
    root = tmp_path / "tasks"
    make_task(root / "add")
    make_task(root / "group" / "sub-1", instruction="Subtract.")
    make_task(root / "Über")
    (root / "notes").mkdir()
    (root / "notes" / "README.md").write_text("no task")
    make_task(root / ".hidden" / "x")
    return root


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def refused(source, workspace, metadata, field, prompt=PROMPT):
    with pytest.raises(InvalidFieldError) as caught:
        source.resolve(request(metadata, prompt), workspace)
    assert caught.value.field == field
    return str(caught.value)


# --- template -------------------------------------------------------------------------------------


def test_a_template_runs_a_copy_with_the_prompt(tmp_path, workspace):
    template = make_task(tmp_path / "base")
    before = {path: path.read_bytes() for path in template.rglob("*") if path.is_file()}
    task = TaskSource(template).resolve(request(), workspace)
    assert task.name == "base"
    assert task.folder == workspace / "task" / "base"
    assert task.source == {"path": task.folder}
    assert task.own_tests is True
    assert task.instruction == "Add two numbers."
    assert (task.folder / "instruction.md").read_text() == "Add two numbers."
    assert stat.S_IMODE((task.folder / "tests" / "test.sh").stat().st_mode) == 0o755
    assert {path: path.read_bytes() for path in template.rglob("*") if path.is_file()} == before


def test_the_placeholder_keeps_the_text_around_it(tmp_path, workspace):
    template = make_task(tmp_path / "base", instruction="# Task\n\n{{ prompt }}\n\nWrite {{x}}.\n")
    (template / "environment" / "note.md").write_text("{{ prompt }}")
    task = TaskSource(template, "template").resolve(
        request(prompt=[{"role": "user", "content": r"Say \1 and {{ prompt }}."}]), workspace
    )
    assert task.instruction == "# Task\n\nSay \\1 and {{ prompt }}.\n\nWrite {{x}}.\n"
    assert (task.folder / "instruction.md").read_text() == task.instruction
    assert (task.folder / "environment" / "note.md").read_text() == "{{ prompt }}"


def test_rollouts_get_copies_of_their_own(tmp_path):
    source = TaskSource(make_task(tmp_path / "base"))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = source.resolve(request(), tmp_path / "a")
    second = source.resolve(request(prompt=[{"role": "user", "content": "Else."}]), tmp_path / "b")
    (first.folder / "tests" / "test.sh").write_text("changed")
    assert first.folder != second.folder
    assert (second.folder / "tests" / "test.sh").read_text() != "changed"
    assert (second.folder / "instruction.md").read_text() == "Else."


def test_an_edited_template_is_read_again(tmp_path, workspace):
    template = make_task(tmp_path / "base")
    source = TaskSource(template)
    (template / "task.toml").write_text('[environment]\nnetwork_mode = "no-network"\n')
    assert source.resolve(request(), workspace).offline


def test_a_template_without_instruction_or_tests(tmp_path, workspace):
    template = make_task(tmp_path / "base")
    (template / "instruction.md").unlink()
    (template / "tests" / "test.sh").unlink()
    task = TaskSource(template).resolve(request(), workspace)
    assert task.own_tests is False
    assert (task.folder / "instruction.md").read_text() == "Add two numbers."


def test_a_template_with_steps_is_refused_with_advice(tmp_path):
    config = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    template = make_task(tmp_path / "base", config)
    with pytest.raises(BackendConfigurationError, match=r"one, two.*task_mode='dataset'"):
        TaskSource(template)


def test_a_template_with_a_link_out_is_refused(tmp_path):
    template = make_task(tmp_path / "base")
    (template / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(BackendConfigurationError, match="tests/passwd is an absolute link"):
        TaskSource(template)


def test_a_template_takes_no_task_id(tmp_path, workspace):
    source = TaskSource(make_task(tmp_path / "base"))
    message = refused(source, workspace, {"harbor_task_id": "add"}, "metadata.harbor_task_id")
    assert "task_mode='dataset'" in message


# --- dataset --------------------------------------------------------------------------------------


def test_a_dataset_task_keeps_its_instruction(dataset, workspace):
    source = TaskSource(dataset, "dataset")
    task = source.resolve(request({"harbor_task_id": "group/sub-1"}), workspace)
    assert task.name == "group/sub-1"
    assert task.folder == dataset / "group" / "sub-1"
    assert task.instruction == "Subtract."
    assert list(workspace.iterdir()) == []


@pytest.mark.parametrize("task_id", ["add", "Über", "group/sub-1"])
def test_known_tasks_have_the_names_of_resolved_ones(dataset, workspace, task_id):
    source = TaskSource(dataset, "dataset")
    known = {task.name: task for task in source.known()}
    assert set(known) == {"add", "Über", "group/sub-1"}
    task = source.resolve(request({"harbor_task_id": task_id}), workspace)
    assert known[task.name].source == task.source


@pytest.mark.parametrize(
    "task_id",
    ["", ".", "..", "../tasks/add", "add/..", "/etc", "add//x", "add/", "./add", "a\\b", "a\0b",
     "a\nb", "--flag", 7, ["add"], True],
)  # fmt: skip
def test_a_task_id_is_a_path_below(dataset, workspace, task_id):
    source = TaskSource(dataset, "dataset")
    refused(source, workspace, {"harbor_task_id": task_id}, "metadata.harbor_task_id")


@pytest.mark.parametrize("task_id", ["none", "notes", "group", "add/tests"])
def test_a_task_id_names_a_task(dataset, workspace, task_id):
    source = TaskSource(dataset, "dataset")
    message = refused(source, workspace, {"harbor_task_id": task_id}, "metadata.harbor_task_id")
    assert "names no task" in message


def test_a_task_behind_a_link_out_is_refused(dataset, workspace, tmp_path):
    make_task(tmp_path / "secret")
    (dataset / "away").symlink_to("../secret")
    (dataset / "self").symlink_to(".")
    (dataset / "also-add").symlink_to("add")
    source = TaskSource(dataset, "dataset")
    for name in ("away", "self", "self/away"):
        message = refused(source, workspace, {"harbor_task_id": name}, "metadata.harbor_task_id")
        assert "out of the backend's tasks_dir" in message
    # A link to another task of the same dataset is one more name for it.
    task = source.resolve(request({"harbor_task_id": "also-add"}), workspace)
    assert task.folder == dataset / "add"
    assert "away" not in {each.name for each in source.known()}


def test_links_out_of_a_dataset_task_are_the_operators_fault(dataset, workspace):
    (dataset / "add" / "tests" / "x").symlink_to("../../group/sub-1/task.toml")
    with pytest.raises(BackendConfigurationError, match="task add: tests/x is a link out"):
        TaskSource(dataset, "dataset").resolve(request({"harbor_task_id": "add"}), workspace)


def test_a_broken_task_file_is_the_operators_fault(dataset, workspace):
    (dataset / "add" / "task.toml").write_text("= 1")
    with pytest.raises(BackendConfigurationError, match=r"task add: .*TOML"):
        TaskSource(dataset, "dataset").resolve(request({"harbor_task_id": "add"}), workspace)


def test_a_dataset_needs_an_id(dataset, workspace):
    refused(TaskSource(dataset, "dataset"), workspace, None, "metadata.harbor_task_id")


def test_steps_are_fine_in_a_dataset(dataset, workspace):
    task = dataset / "add"
    (task / "task.toml").write_text('[[steps]]\nname = "one"\n')
    (task / "steps" / "one").mkdir(parents=True)
    (task / "steps" / "one" / "instruction.md").write_text("First.")
    found = TaskSource(dataset, "dataset").resolve(request({"harbor_task_id": "add"}), workspace)
    assert found.own_tests is True
    assert found.instruction == ""


# --- a task of a rollout's own --------------------------------------------------------------------


def test_a_path_below_the_dataset(dataset, workspace):
    source = TaskSource(dataset, "dataset")
    for value in ({"path": "add"}, "./add", "add", str(dataset / "add"), {"path": "./add"}):
        task = source.resolve(request({"harbor_task": value}), workspace)
        assert (task.name, task.folder) == ("add", dataset / "add")


def test_no_path_elsewhere_unless_allowed(dataset, workspace, tmp_path):
    other = make_task(tmp_path / "other")
    for source in (TaskSource(dataset, "dataset"), TaskSource(dataset / "add"), TaskSource()):
        refused(
            source, workspace, {"harbor_task": {"path": str(other)}}, "metadata.harbor_task.path"
        )
    free = TaskSource(dataset / "add", allow_any_path=True)
    assert free.resolve(request({"harbor_task": str(other)}), workspace).folder == other
    refused(free, workspace, {"harbor_task": str(tmp_path)}, "metadata.harbor_task.path")


def test_a_relative_path_needs_a_dataset(dataset, workspace):
    for source in (TaskSource(dataset / "add"), TaskSource(None, "dataset")):
        refused(source, workspace, {"harbor_task": {"path": "tests"}}, "metadata.harbor_task")


def test_remote_tasks_wait_for_their_download(workspace):
    package = TaskSource().resolve(request({"harbor_task": "org/name@2"}), workspace)
    assert (package.name, package.folder) == ("org/name@2", None)
    assert package.source == {"name": "org/name", "ref": "2"}
    url = "https://robot:hunter2@example.com/r.git"
    git = TaskSource().resolve(
        request({"harbor_task": {"git_url": url, "path": "t/a", "git_commit_id": "main"}}),
        workspace,
    )
    assert git.name == "https://example.com/r.git@main:t/a"
    assert git.source == {"git_url": url, "git_commit_id": "main", "path": "t/a"}


def test_without_tasks_a_rollout_names_its_own(workspace):
    for mode in ("template", "dataset"):
        source = TaskSource(None, mode)
        refused(source, workspace, None, "metadata.harbor_task")
        assert source.known() == []


def test_two_names_are_one_too_many(dataset, workspace):
    metadata = {"harbor_task": "a/b", "harbor_task_id": "add"}
    refused(TaskSource(dataset, "dataset"), workspace, metadata, "metadata.harbor_task")


@pytest.mark.parametrize("model", [7, "", "  ", None, ["x"]])
def test_the_model_is_a_name(dataset, workspace, model):
    metadata = {"harbor_task_id": "add", "harbor_model": model}
    refused(TaskSource(dataset, "dataset"), workspace, metadata, "metadata.harbor_model")


# --- configuration --------------------------------------------------------------------------------


def test_configuration_errors(dataset, tmp_path):
    with pytest.raises(BackendConfigurationError, match="not a folder"):
        TaskSource(tmp_path / "none")
    with pytest.raises(BackendConfigurationError, match="'template', 'dataset'"):
        TaskSource(dataset, "other")
    with pytest.raises(BackendConfigurationError, match=r"has no task\.toml"):
        TaskSource(dataset)
    with pytest.raises(BackendConfigurationError, match="is a task itself"):
        TaskSource(dataset / "add", "dataset")


def test_modes_have_names(dataset):
    from rollout.backend.harbor import TaskMode

    assert TaskSource(dataset, TaskMode.DATASET).task_mode is TaskMode.DATASET
    assert TaskSource(dataset, "dataset").task_mode is TaskMode.DATASET
    with pytest.raises(BackendConfigurationError, match="one of 'template', 'dataset'"):
        TaskSource(dataset, "datasets")
