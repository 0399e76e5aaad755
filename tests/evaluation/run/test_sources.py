"""The sources of a run's own server: what is found, and how a change is named."""

from __future__ import annotations

import json

import pytest
from evaluation.run.cases import config_of, run_all, scripted

import rollout.evaluation.run
from rollout.errors import EvaluationError, EvaluationInputsChangedError
from rollout.evaluation import compare_runs
from rollout.evaluation.sources import Sources


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A file with helpers, a package, and what is not to be found."""
    monkeypatch.chdir(tmp_path)
    texts = {
        "server.py": "import json, httpx, helpers\nworkflow = 'agents.solver:Solver'\n",
        "helpers.py": "import server\nfrom deep.inner import x\nimport not_installed\n",
        "unrelated.py": "",
        "deep/inner/x.py": "import attrs\n",
        "agents/__init__.py": "from . import solver\n",
        "agents/solver.py": "raise RuntimeError('imported')\n",
        "agents/broken.py": "def (:\n",
        "agents/prompts/system.md": "Be brief.",
        "agents/weights.bin": "00",
        "agents/.hidden.md": "",
        "agents/__pycache__/solver.txt": "",
        "agents/run/.lock": "",
        "agents/run/manifest.json": "{}",
        "agents/run/trajectories/0-0-0.json": "{}",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


AGENTS = {"agents/__init__.py", "agents/solver.py", "agents/broken.py", "agents/prompts/system.md"}


def test_what_a_file_imports(project):
    found = Sources.of_app("server.py:app", {})
    assert set(found.files) == {"helpers.py", "deep/inner/x.py", *AGENTS}
    assert set(found.distributions) == {"httpx", "attrs"}
    assert found == Sources.of_app(f"{project}/server.py:make.app", {})


def test_what_a_module_imports(project):
    assert set(Sources.of_app("agents.solver:app", {}).files) == AGENTS
    assert "server.py" in Sources.of_app("server:app", {}).files
    assert Sources.of_app("no.such:app", {}).files == {}


def test_a_path_of_the_servers_own(project):
    (project / "src").mkdir()
    (project / "src" / "beside.py").touch()
    assert Sources.of_app("beside:app", {}).files == {}
    assert set(Sources.of_app("beside:app", {"PYTHONPATH": "src"}).files) == {"beside.py"}


def test_a_file_that_cannot_be_read(project):
    with pytest.raises(EvaluationError, match=r"server\.app: gone\.py: No such file"):
        Sources.of_app("gone.py:app", {})


@pytest.fixture
def served(monkeypatch):
    """Any application, without a process."""

    async def connect(stack, config, credentials, run, **_):
        client = rollout.evaluation.run.RolloutClient(url="http://fake")
        return await stack.enter_async_context(client)

    monkeypatch.setattr("rollout.evaluation.run._connect", connect)


@pytest.mark.usefixtures("served", "server")
async def test_a_change_is_named_by_its_files(project, monkeypatch):
    config = config_of(project, server={"app": "server.py:app"}, rows=scripted(1))
    run, _ = await run_all(config)
    assert (await run_all(config))[1] == []
    (project / "unrelated.py").write_text("x = 1")
    (project / "agents" / "cache.bin").write_text("x = 1")
    assert (await run_all(config))[1] == []

    (project / "helpers.py").write_text("from deep.inner import x\nimport more")
    (project / "more.py").touch()
    (project / "agents" / "broken.py").unlink()
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name}-9")
    with pytest.raises(EvaluationInputsChangedError) as caught:
        await run_all(config)
    *versions, files = caught.value.changes
    assert files == "server sources changed: agents/broken.py (gone), helpers.py, more.py (new)"
    assert [change.split(" was ")[0] for change in versions] == [
        "server.distributions.attrs",
        "server.distributions.httpx",
    ]
    assert versions[1].endswith('and is "httpx-9"')

    other = config_of(project, server={"app": "server.py:app"}, output=str(project / "other"))
    await run_all(other)
    differences = compare_runs(run.folder, project / "other").differences
    assert differences[-1] == files

    (project / "agents" / "other.py").write_text("")
    for number in range(10):
        (project / "agents" / f"x{number}.py").touch()
    with pytest.raises(EvaluationInputsChangedError, match=r"x5\.py \(new\), and 6 more\. Change"):
        await run_all(config)
    renamed = config_of(project, server={"app": "server.py:other"})
    with pytest.raises(EvaluationInputsChangedError) as caught:
        await run_all(renamed)
    assert len(caught.value.changes) == 1


@pytest.mark.usefixtures("served", "server")
async def test_a_run_of_a_release_that_did_not_keep_them_goes_on(project):
    config = config_of(project, server={"app": "server.py:app"}, rows=scripted(1))
    run, _ = await run_all(config)
    manifest = run.folder / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["server"]["sources"], document["server"]["distributions"]
    manifest.write_text(json.dumps(document))
    await run_all(config)
    assert "helpers.py" in json.loads(manifest.read_text())["server"]["sources"]


def test_what_is_beside_the_file_goes_before_what_is_installed(project):
    other = project / "elsewhere"
    other.mkdir()
    (other / "server.py").write_text("import helpers, agents\n")
    (other / "helpers.py").write_text("import httpx")
    (project / "httpx.py").touch()
    (project / "agents" / "solver.py").touch()
    found = Sources.of_app("elsewhere/server.py:app", {})
    assert found.distributions == {}
    assert set(found.files) == {"helpers.py", "httpx.py", *AGENTS}
