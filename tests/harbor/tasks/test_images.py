"""Tasks with published images in place of what they would build."""

from __future__ import annotations

import json
import tomllib

import pytest

from rollout.backend.harbor.tasks.files import describe
from rollout.backend.harbor.tasks.images import load_bindings, with_images
from rollout.errors import BackendConfigurationError

pytestmark = pytest.mark.harbor

DIGEST = "@sha256:" + "0a" * 32
ONE, TWO = f"registry.example:5000/tasks/one{DIGEST}", f"registry.example/two{DIGEST}"


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "tasks" / "answer"
    for name in ("environment", "tests", "steps/first"):
        (folder / name).mkdir(parents=True)
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "instruction.md").write_text("Do it.")
    (folder / "steps/first/instruction.md").write_text("Do it.")
    return folder


def bound(folder, workspace, images, toml=""):
    (folder / "task.toml").write_text(toml)
    workspace.mkdir()
    copy = with_images(describe(folder, "answer"), workspace, load_bindings({"answer": images}))
    assert (folder / "task.toml").read_text() == toml
    assert copy.source == {"path": str(copy.folder)}
    assert (copy.folder / "environment" / "Dockerfile").is_file()
    return tomllib.loads((copy.folder / "task.toml").read_text())


def test_the_image_goes_into_a_copy(task, tmp_path):
    toml = '[metadata]\nlevel = "easy"\n[environment]\nnetwork_mode = "no-network"\ncpus = 2\n'
    config = bound(task, tmp_path / "work", ONE, toml)
    assert config["environment"]["docker_image"] == ONE
    assert config["environment"]["network_mode"] == "no-network"
    assert config["environment"]["cpus"] == 2
    assert config["metadata"] == {"level": "easy"}


def test_a_copy_of_the_rollouts_own_is_not_copied_again(task, tmp_path):
    (task / "task.toml").write_text("")
    found = with_images(describe(task, "answer"), tmp_path, {"answer": {"environment": ONE}})
    assert found.folder == task
    assert ONE in (task / "task.toml").read_text()


APART = '[verifier]\nenvironment_mode = "separate"\n'
OWN = f"{APART}[verifier.environment]\ncpus = 3\n"
STEPS = '[[steps]]\nname = "first"\n'


def test_tests_with_an_environment_of_their_own(task, tmp_path):
    images = {"environment": ONE, "verifier.environment": TWO}
    config = bound(task, tmp_path / "own", images, OWN)
    assert config["verifier"]["environment"]["docker_image"] == TWO
    assert config["verifier"]["environment"]["cpus"] == 3
    # They run in the agent's image, so it is the agent's that counts.
    config = bound(task, tmp_path / "apart", images, APART)
    assert "environment" not in config["verifier"]


def test_tests_of_a_step(task, tmp_path):
    images = {"environment": ONE, "steps.0.verifier.environment": TWO}
    (step,) = bound(task, tmp_path / "own", images, OWN + STEPS)["steps"]
    assert step["verifier"]["environment"]["docker_image"] == TWO
    assert step["verifier"]["environment"]["cpus"] == 3
    images["steps.1.verifier.environment"] = TWO
    with pytest.raises(BackendConfigurationError, match=r"answer cannot .*: it has no step 1"):
        bound(task, tmp_path / "missing", images, OWN + STEPS)


def test_a_task_without_an_image_does_not_run(task, tmp_path):
    (task / "task.toml").write_text("")
    with pytest.raises(BackendConfigurationError, match="task answer has no image"):
        with_images(describe(task, "answer"), tmp_path / "work", load_bindings({"other": ONE}))


def test_without_bindings_a_task_stays_as_it_is(task, tmp_path):
    (task / "task.toml").write_text("")
    found = describe(task, "answer")
    assert with_images(found, tmp_path / "work", load_bindings(None)) is found


MANIFEST = {
    "schema_version": "source-v1",
    "hash_policy": "harbor-v1",
    "images": [{"key": "a", "image": ONE}, {"key": "b", "image": TWO, "size": 7}],
    "tasks": [
        {"task": "group/x", "environments": {"environment": "a", "verifier.environment": "b"}},
        {"task": "y", "environments": {"environment": "b"}},
    ],
}
RESOLVED = {
    "group/x": {"environment": {"key": "a", "image": ONE}, "verifier.environment": {"image": TWO}},
    "y": {"environment": {"key": "b", "image": TWO}},
}


@pytest.mark.parametrize(
    "document",
    [
        MANIFEST,
        MANIFEST | {"tasks": RESOLVED},
        {"group/x": {"environment": ONE, "verifier.environment": TWO}, "y": TWO},
    ],
)
def test_a_file_or_a_mapping(tmp_path, document):
    path = tmp_path / "images.json"
    path.write_text(json.dumps(document))
    assert load_bindings(path) == load_bindings(str(path)) == load_bindings(document)
    assert load_bindings(path) == {
        "group/x": {"environment": ONE, "verifier.environment": TWO},
        "y": {"environment": TWO},
    }


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "is a mapping"),
        ("/no/such/file", "cannot be read"),
        ({"t": 7}, r"\['t'\] is an image"),
        ({"t": {"verifier.environment": ONE}}, "with one for 'environment'"),
        ({"t": {"environment": ONE, "agent": TWO}}, "'agent' is not 'environment'"),
        ({"t": "two words"}, "is not an image's name"),
        ({"schema_version": "source-v2"}, "not of schema source-v1"),
        (MANIFEST | {"images": []}, r"damaged \(KeyError: 'a'\)"),
        (MANIFEST | {"tasks": {"t": {"environment": ONE}}}, "damaged"),
        (MANIFEST | {"tasks": 7}, "damaged"),
    ],
)
def test_bindings_that_cannot_be(value, words):
    with pytest.raises(BackendConfigurationError, match=words):
        load_bindings(value)
