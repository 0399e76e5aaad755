"""Every Python block of the documentation compiles and runs, and every link leads somewhere."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest
from documentation.blocks import (
    PAGES,
    PYTHON,
    README,
    ROOT,
    SDK,
    SERVER,
    defined_by,
)
from support import (
    Script,
)

from rollout import LocalBackend

pytestmark = pytest.mark.usefixtures("readers_own_modules")


def test_there_are_blocks_to_test():
    assert {block.page for block in PYTHON} >= {README, SDK, SERVER}


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_compiles_and_what_it_imports_exists(block):
    imports = [
        node
        for node in ast.walk(ast.parse(block.code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert block.compiled
    exec(compile(ast.Module(imports, []), str(block), "exec"), {})


@pytest.mark.parametrize(
    "block", [block for block in PYTHON if "\ntrio.run(" not in block.code], ids=str
)
def test_a_block_that_defines_things_runs(block):
    given = {"backend": LocalBackend(workflow=Script)}
    new = defined_by(block, **given).keys() - given.keys() - {"__name__", "__builtins__"}
    assert new


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page):
    text = (ROOT / page).read_text("utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)  # x[T](1) is no link
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if ":" not in target]
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def test_the_changelog_has_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"\n## {project['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
