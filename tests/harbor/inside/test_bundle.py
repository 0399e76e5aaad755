"""The files and requirements of a workflow in a sandbox. No Harbor is needed for that."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest

from rollout.backend.harbor.inside.bundle import Bundle, make_bundle, tree_files
from rollout.errors import BackendConfigurationError


def test_the_same_files_make_the_same_bytes():
    one = Bundle({"a.py": b"1", "b.py": b"2"}, ()).archive()
    assert one == Bundle({"b.py": b"2", "a.py": b"1"}, ()).archive()
    with zipfile.ZipFile(io.BytesIO(one)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == {
            "a.py": b"1",
            "b.py": b"2",
        }


def test_an_installed_distribution_comes_along_without_what_says_from_where(project):
    project("import sortedcontainers")
    files = make_bundle(["bundled_flow"]).files
    assert "sortedcontainers/sortedlist.py" in files
    assert [name for name in files if name.startswith("sortedcontainers-")]
    assert not [name for name in files if "__pycache__" in name or ".." in name]
    assert not [name for name in files if name.endswith(("INSTALLER", "RECORD", "direct_url.json"))]


def test_a_tree_leaves_out_what_is_hidden_and_compiled_for_nobody(tmp_path):
    for name in ("a.py", "sub/b.txt", ".env", ".git/config", "__pycache__/a.cpython-311.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert tree_files(tmp_path, "p") == {"p/a.py": b"a.py", "p/sub/b.txt": b"sub/b.txt"}
    (tmp_path / "fast.so").write_bytes(b"")
    with pytest.raises(BackendConfigurationError, match="compiled"):
        tree_files(tmp_path, "p")


def test_a_tree_that_is_too_large(tmp_path):
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(65 * 1024 * 1024)
    with pytest.raises(BackendConfigurationError, match="larger than 64 MiB"):
        tree_files(tmp_path, "p")


# --- bundles ----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes modules that can be imported, and forgets them afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(flow, **files):
        for name, text in {"bundled_flow.py": flow, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("bundled_"):
            del sys.modules[name]


def own(bundle):
    return {name for name in bundle.files if name.startswith(("bundled_", "serve_it"))}


def names(bundle):
    return {name.partition("-")[0] for name in bundle.files if name.endswith(".dist-info/METADATA")}


def test_a_bundle_follows_imports_through_sources(project):
    project(
        "import bundled_a.deep, json\nfrom .gone import x\nimport no_such_module_at_all",
        **{
            "bundled_a/__init__.py": "",
            "bundled_a/deep.py": "def late():\n    from bundled_b import B\n    import outcome",
            "bundled_b.py": "import bundled_flow\nB = 1",
            "bundled_unused.py": "",
            "bundled_a/no_python.py": "import (",
        },
    )
    bundle = make_bundle(["bundled_flow"])
    assert own(bundle) == {
        "bundled_flow.py", "bundled_a/__init__.py", "bundled_a/deep.py", "bundled_b.py",
        "bundled_a/no_python.py",
    }  # fmt: skip
    assert names(bundle) >= {"trio_rollout", "trio", "attrs", "cattrs", "outcome", "sniffio"}
    assert bundle.needs == ()


def test_installed_distributions_come_along_with_what_they_require(project):
    project("import quart\n")
    assert {"quart", "werkzeug", "jinja2"} <= names(make_bundle(["bundled_flow"]))


def test_compiled_distributions_are_left_to_the_sandbox(project):
    project("import markupsafe")
    bundle = make_bundle(["bundled_flow"])
    needs = {need.requirement.partition("==")[0].lower(): need.imports for need in bundle.needs}
    assert needs == {"markupsafe": ("markupsafe",)}


def test_requirements_that_no_import_shows(project):
    project("")
    bundle = make_bundle(["bundled_flow"], requirements=["sortedcontainers", "not-here-0815>=2"])
    assert "sortedcontainers" in names(bundle)
    assert [need.requirement for need in bundle.needs] == ["not-here-0815>=2"]
    with pytest.raises(BackendConfigurationError, match="not a requirement"):
        make_bundle(["bundled_flow"], requirements=["!"])


@pytest.mark.parametrize(
    ("marker", "applies"),
    [
        ('sys_platform == "win32" or sys_platform == "linux"', True),
        ('sys_platform == "win32" and python_version >= "3.11"', False),
        ('sys_platform != "win32"', True),
        ('platform_system in "Darwin, Windows"', False),
        ('python_version < "3.12"', True),
        ('python_version < "3.8"', False),
        ('extra == "fast"', False),
        ('extra == "fast" or os_name == "posix"', True),
    ],
)
def test_markers_are_those_of_a_sandbox(project, marker, applies):
    project("")
    bundle = make_bundle(["bundled_flow"], requirements=[f"not-here-0815>=2 ; {marker}"])
    assert [need.requirement for need in bundle.needs] == ["not-here-0815>=2"] * applies


def test_a_module_without_source(project):
    with pytest.raises(BackendConfigurationError, match="no_such_module_at_all"):
        make_bundle(["no_such_module_at_all"])


def test_a_script_becomes_a_module(project):
    folder = project("", **{"bundled_b.py": ""})
    script = folder / "serve_it.py"
    script.write_text("import bundled_b\n")
    assert own(make_bundle([], main=("serve_it", script))) == {"serve_it.py", "bundled_b.py"}


# --- a user's own code --------------------------------------------------------------------------


def code(folder, **files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def wheel(path, **files):
    """A wheel as build backends write it; ``requires`` has its requirements."""
    lines = [f"Requires-Dist: {each}\n" for each in files.pop("requires", [])]
    files["given-1.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: given\n{''.join(lines)}"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_folder_of_code_goes_in_whole_and_goes_before_what_can_be_imported(project, tmp_path):
    project("HERE = 'on this machine'", **{"bundled_a.py": ""})
    folder = code(
        tmp_path / "code",
        **{
            "pyproject.toml": '[project]\nname = "x"\ndependencies = ["not-here-0815>=2"]\n',
            "bundled_flow.py": "HERE = 'given'\nimport bundled_a, quart",
            "bundled_plugins/late.py": "",
            "bundled_plugins/prompt.txt": "be brief",
            ".venv/x.so": "",
        },
    )
    bundle = make_bundle(["bundled_flow"], code=folder)
    assert own(bundle) == {
        "bundled_flow.py", "bundled_plugins/late.py", "bundled_plugins/prompt.txt"
    }  # fmt: skip
    assert b"given" in bundle.files["bundled_flow.py"]
    # What it depends on is declared, so its imports are not followed.
    assert [need.requirement for need in bundle.needs] == ["not-here-0815>=2"]
    assert "quart" not in names(bundle)


def test_a_folder_without_dependencies_has_its_imports_followed(project, tmp_path):
    project("", **{"bundled_a.py": ""})
    folder = code(tmp_path / "code", **{"src/bundled_x/__init__.py": "import bundled_a, attr"})
    (folder / "bundled_outside_of_src.py").write_text("")
    assert own(make_bundle(["bundled_x"], code=folder)) == {"bundled_x/__init__.py", "bundled_a.py"}


def test_a_wheel_goes_in_with_what_it_requires(tmp_path):
    path = wheel(
        tmp_path / "given-1-py3-none-any.whl",
        **{
            "bundled_flow/__init__.py": "import pytest",
            "bundled_flow/deep.py": "",
            "given-1.data/scripts/run": "",
            "given-1.dist-info/RECORD": "",
        },
        requires=["quart", "not-here-0815>=2", "not-asked-for; extra == 'dev'"],
    )
    bundle = make_bundle(["bundled_flow.deep"], code=path)
    assert own(bundle) == {"bundled_flow/__init__.py", "bundled_flow/deep.py"}
    assert {name for name in bundle.files if name.startswith("given")} == {
        "given-1.dist-info/METADATA"
    }
    assert {"quart", "werkzeug"} <= names(bundle)
    assert "pytest" not in names(bundle)
    assert "MarkupSafe" in bundle.needs[0].requirement
    assert [need.requirement for need in bundle.needs[1:]] == ["not-here-0815>=2"]


def test_code_that_cannot_go_in(tmp_path):
    torn = tmp_path / "torn.whl"
    torn.write_bytes(b"PK")
    fast = wheel(tmp_path / "fast.whl", **{"bundled_fast/core.so": ""})
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        archive.writestr("bundled_flow.py", "")
    broken = code(tmp_path / "broken", **{"pyproject.toml": "["})
    listed = code(tmp_path / "listed", **{"pyproject.toml": "[project]\ndependencies = [1]"})
    whole = code(tmp_path / "whole", **{"bundled_flow/__init__.py": ""})
    for path, module, words in (
        (torn, "x", "not a wheel that can be read"),
        (tmp_path / "plain.zip", "x", "not a wheel, since it has no metadata"),
        (fast, "x", r"core\.so is compiled"),
        (broken, "x", "not valid TOML"),
        (listed, "x", "not a list of strings"),
        (whole, "no_such_module_at_all", "it is not in .*whole, and cannot be imported here"),
        (whole, "bundled_flow.gone", r"module 'bundled_flow\.gone' is not in .*whole"),
    ):
        with pytest.raises(BackendConfigurationError, match=words):
            make_bundle([module], code=path)


def test_a_wheel_that_is_too_large(tmp_path):
    path = tmp_path / "large.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bundled_data.bin", bytes(65 * 1024 * 1024))
    with pytest.raises(BackendConfigurationError, match="larger than 64 MiB"):
        make_bundle([], code=path)


def test_a_bundle_is_enough_for_a_python_without_packages(project, tmp_path):
    project("import rollout, httpx, trio\nprint(rollout.AgentWorkflow.__name__)")
    site = tmp_path / "site"
    with zipfile.ZipFile(io.BytesIO(make_bundle(["bundled_flow"]).archive())) as archive:
        archive.extractall(site)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import bundled_flow, trio;"
        "import rollout.backend.harbor.inside.runner; print(trio.__file__);"
        "from importlib.metadata import version; print(version('trio-rollout'))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "AgentWorkflow",
        str(site / "trio" / "__init__.py"),
        metadata.version("trio-rollout"),
    ]
