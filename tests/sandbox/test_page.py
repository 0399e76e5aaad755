"""The examples of the page on sandboxes."""

from __future__ import annotations

import platform

from documentation.blocks import defined_by, find

PAGE = "docs/sandbox.md"


def test_a_project_is_checked(namespaces, run, tmp_path, monkeypatch):
    check = defined_by(find(PAGE, "async def check"))["check"]
    (tmp_path / "project").mkdir()
    (tmp_path / "project/test.sh").write_text("echo fine > report.txt")
    monkeypatch.chdir(tmp_path)
    assert run(check, "project") is True
    assert (tmp_path / "report.txt").read_text() == "fine\n"


async def test_a_command_runs_over_a_bridge(namespaces):
    kernel = defined_by(find(PAGE, "async def kernel"))["kernel"]
    assert await kernel() == platform.release() + "\n"
