"""What ``rollout serve`` can be pointed at, and what it says to everything else."""

from __future__ import annotations

import sys

import pytest

from rollout.cli.failures import CommandError
from rollout.cli.reference import load_app
from rollout.server import RolloutServer

MODULE = """
from support import make_app
from rollout.server import create_rollout_server

app = make_app()
number = 7


class Holder:
    app = make_app()


def factory(): return make_app()
def needs(backend): return make_app(backend)
def returns_text(): return "app"
def breaks(): return 1 / 0
def leaves(): raise SystemExit("bye")
def rejected(): return make_app(api_key="")
async def later(): return make_app()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", "") is not None and str(tmp_path) in str(
            getattr(sys.modules[name], "__file__", "")
        ):
            del sys.modules[name]


@pytest.fixture
def module(folder):
    (folder / "reference_apps.py").write_text(MODULE)


@pytest.mark.parametrize("where", ["reference_apps", "reference_apps.py", "./reference_apps.py"])
@pytest.mark.parametrize("what", ["app", "Holder.app", "factory"])
def test_finds_applications(module, where, what):
    assert isinstance(load_app(f"{where}:{what}"), RolloutServer)


FOR_CHECKERS = f"""
{"" if sys.version_info >= (3, 14) else "from __future__ import annotations"}
from typing import TYPE_CHECKING
from support import make_app
if TYPE_CHECKING:
    from somewhere import Application, Settings

def factory() -> Application: return make_app()
def needs(settings: Settings) -> Application: return make_app()
"""


def test_annotations_that_only_a_checker_can_read(folder):
    (folder / "for_checkers.py").write_text(FOR_CHECKERS)
    assert isinstance(load_app("for_checkers:factory"), RolloutServer)
    with pytest.raises(CommandError, match="cannot be called without arguments"):
        load_app("for_checkers:needs")


def test_a_file_is_imported_under_its_own_name(module):
    load_app("reference_apps.py:app")
    assert sys.modules["reference_apps"].number == 7


@pytest.mark.parametrize("name", ["types", "click", "my-app"])
def test_a_file_never_hides_another_module(folder, name):
    (folder / f"{name}.py").write_text("from support import make_app\napp = make_app()\n")
    before = sys.modules.get(name)
    assert isinstance(load_app(f"{name}.py:app"), RolloutServer)
    assert sys.modules.get(name) is before


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("", "MODULE:APP or FILE.py:APP"),
        ("reference_apps", "FILE.py:APP, as in reference_apps:app"),
        ("reference_apps.py", "FILE.py:APP, as in reference_apps.py:app"),
        (".", "FILE.py:APP, not '.'"),
        ("reference_apps:", "MODULE:APP or FILE.py:APP"),
        (":app", "MODULE:APP or FILE.py:APP"),
        ("missing_module:app", "there is no module 'missing_module'"),
        ("reference_apps.inner:app", "there is no module 'reference_apps.inner'"),
        ("missing.py:app", "there is no file 'missing.py'"),
        (".:app", "is not the name of a module"),
        ("folder/reference_apps:app", "a file with its .py"),
        ("reference_apps:other", "no attribute 'other'; it has the application 'app'"),
        ("reference_apps:app.nothing", "no attribute 'app.nothing'"),
        ("json:other", "it holds no application"),
        ("reference_apps:number", "is a int, not an application"),
        ("json:decoder", "is a module, not an application"),
        ("reference_apps:needs", "cannot be called without arguments"),
        ("reference_apps:returns_text", "returned a str, not an application"),
        ("reference_apps:breaks", "ZeroDivisionError: division by zero"),
        ("reference_apps:leaves", "SystemExit: bye"),
        ("reference_apps:later", "is async"),
        ("reference_apps:Holder", "returned a Holder"),
    ],
)
def test_bad_references(module, reference, words):
    with pytest.raises(CommandError) as caught:
        load_app(reference)
    assert words in caught.value.message
    assert caught.value.code == 2


def test_names_the_line_of_the_users_code(module, folder):
    with pytest.raises(CommandError, match="api_key must not be empty") as caught:
        load_app("reference_apps.py:rejected")
    line = 1 + MODULE.splitlines().index('def rejected(): return make_app(api_key="")')
    # The last frame outside of the library is the helper of these tests that it calls.
    assert "support.py, line" in caught.value.message or f"line {line})" in caught.value.message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero ("),
        ("def broken(:\n", "SyntaxError"),
        ("import not_installed_anywhere\n", "No module named 'not_installed_anywhere'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("raise LookupError\n", "importing "),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".py"])
def test_modules_that_do_not_import(folder, source, words, suffix):
    (folder / "broken_app.py").write_text(source)
    with pytest.raises(CommandError) as caught:
        load_app(f"broken_app{suffix}:app")
    assert words in caught.value.message
    assert caught.value.message.count("line 1)") == 1
    assert "broken_app" not in sys.modules


def test_ctrl_c_in_a_module_is_no_import_error(folder):
    (folder / "slow_app.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_app("slow_app:app")


def test_command_shows_one_line(cli, module):
    assert "there is no module" in cli.fails(2, "serve", "missing_module:app")
