"""The folder that becomes the root."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rollout.sandbox.layout import Bind, check_bind, prepare_root


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def test_the_paths_of_harbor_exist_with_their_modes(root):
    prepare_root(root, "box")
    modes = {
        name: stat.S_IMODE((root / name).stat().st_mode)
        for name in ("app", "tests", "solution", "logs/agent", "logs/verifier", "tmp", "root")
    }
    assert modes == {
        "app": 0o755,
        "tests": 0o755,
        "solution": 0o755,
        "logs/agent": 0o777,
        "logs/verifier": 0o777,
        "tmp": 0o1777,
        "root": 0o700,
    }


def test_etc_has_what_programs_need_and_no_secret(root):
    binds = prepare_root(root, "box")
    names = {path.name for path in (root / "etc").iterdir()}
    assert {"passwd", "hosts", "hostname", "mtab"} <= names
    secrets = {"shadow", "gshadow", "sudoers", "ssh", "pip.conf", "npmrc", "machine-id"}
    assert names & secrets == set()
    assert "/etc" not in {each.source for each in binds}
    assert not any(each.source.startswith("/etc/ssl/private") for each in binds)
    assert "box" in (root / "etc/hosts").read_text()
    assert not any((root / "etc" / name).is_symlink() for name in ("resolv.conf", "localtime"))


def test_home_folders_of_the_host_are_not_shown(root):
    sources = {each.source for each in prepare_root(root, "box")}
    assert (
        sources & {"/", "/home", "/root", "/var", "/tmp", "/run", "/proc", "/sys", "/dev"} == set()
    )
    assert list((root / "home").iterdir()) == []


def test_everything_of_the_host_is_read_only(root):
    assert [each for each in prepare_root(root, "box") if each.writable] == []


def test_a_folder_and_a_file_can_be_shown_in_places_that_are_made(root, tmp_path):
    (tmp_path / "file").write_text("x")
    binds = [
        check_bind(tmp_path, "/data/deep"),
        check_bind(tmp_path / "file", "/app/file", writable=True),
    ]
    assert prepare_root(root, "box", binds)[-3:-1] == binds
    assert (root / "data/deep").is_dir()
    assert (root / "app/file").is_file()


def test_what_is_shown_anyway_is_not_mounted_twice(root):
    binds = prepare_root(root, "box", [check_bind("/usr/bin")])
    assert "/usr/bin" not in {each.target for each in binds}


@pytest.mark.parametrize("path", ["relative", "/tmp/../etc", "", "/no/such/folder", "/tmp\0"])
def test_a_path_that_cannot_be_shown_is_refused(path):
    with pytest.raises(ValueError):
        check_bind(path)


@pytest.mark.parametrize(
    "target",
    ["/", "/etc", "/etc/passwd", "/proc", "/dev/x", "/usr", "/usr/x", "/tmp", "/logs", "/bin"],
)
def test_a_place_that_a_sandbox_needs_is_refused(tmp_path, target):
    with pytest.raises(ValueError, match="own"):
        check_bind(tmp_path, target)


def test_a_link_is_shown_as_what_it_leads_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert check_bind(tmp_path / "link") == Bind(
        source=str((tmp_path / "real").resolve()), target=str(tmp_path / "link")
    )


def test_a_target_can_be_a_path_with_odd_characters(root, tmp_path):
    odd = tmp_path / "a b\n'\"$x"
    odd.mkdir()
    prepare_root(root, "box", [check_bind(odd)])
    assert Path(str(root) + str(odd)).is_dir()
