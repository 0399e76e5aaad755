"""The folder that becomes the root."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rollout.sandbox import Bind
from rollout.sandbox._root import prepare_root


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def test_folders_exist_with_their_modes(root):
    prepare_root(root)
    modes = {
        name: stat.S_IMODE((root / name).stat().st_mode)
        for name in ("home", "proc", "run/lock", "tmp", "root", "var/lib", "var/tmp")
    }
    assert modes == {
        "home": 0o755,
        "proc": 0o555,
        "run/lock": 0o1777,
        "tmp": 0o1777,
        "root": 0o700,
        "var/lib": 0o755,
        "var/tmp": 0o1777,
    }


def test_etc_has_what_programs_need_and_no_secret(root):
    mounts = prepare_root(root)
    names = {path.name for path in (root / "etc").iterdir()}
    assert {"passwd", "hosts", "hostname", "mtab"} <= names
    secrets = {"shadow", "gshadow", "sudoers", "ssh", "pip.conf", "npmrc", "machine-id"}
    assert names & secrets == set()
    assert "/etc" not in {source for source, _, _ in mounts}
    assert not any(source.startswith("/etc/ssl/private") for source, _, _ in mounts)
    assert "sandbox" in (root / "etc/hosts").read_text()
    assert not any((root / "etc" / name).is_symlink() for name in ("resolv.conf", "localtime"))


def test_home_folders_of_the_host_are_not_shown(root):
    sources = {source for source, _, _ in prepare_root(root)}
    assert (
        sources & {"/", "/home", "/root", "/var", "/tmp", "/run", "/proc", "/sys", "/dev"} == set()
    )
    assert list((root / "home").iterdir()) == []


def test_everything_of_the_host_is_read_only(root):
    assert [mount for mount in prepare_root(root) if mount[2]] == []


def test_a_folder_and_a_file_can_be_shown_in_places_that_are_made(root, tmp_path):
    (tmp_path / "file").write_text("x")
    binds = [
        Bind(tmp_path, "/data/deep"),
        Bind(tmp_path / "file", "/app/file", writable=True),
    ]
    assert prepare_root(root, binds)[-3:-1] == [
        (str(tmp_path), "/data/deep", False),
        (str(tmp_path / "file"), "/app/file", True),
    ]
    assert (root / "data/deep").is_dir()
    assert (root / "app/file").is_file()


def test_what_is_shown_anyway_is_not_mounted_twice(root):
    mounts = prepare_root(root, [Bind("/usr/bin")])
    assert "/usr/bin" not in {target for _, target, _ in mounts}


@pytest.mark.parametrize("path", ["relative", "/tmp/../etc", "", "/no/such/folder", "/tmp\0"])
def test_a_path_that_cannot_be_shown_is_refused(path):
    with pytest.raises(ValueError):
        Bind(path)


@pytest.mark.parametrize(
    "target",
    ["/", "/etc", "/etc/passwd", "/proc", "/dev/x", "/usr", "/usr/x", "/tmp", "/bin"],
)
def test_a_place_that_a_sandbox_needs_is_refused(tmp_path, target):
    with pytest.raises(ValueError, match="own"):
        Bind(tmp_path, target)


def test_a_link_is_shown_as_what_it_leads_to(root, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    shown = (str((tmp_path / "real").resolve()), str(tmp_path / "link"), False)
    assert prepare_root(root, [Bind(tmp_path / "link")])[-2] == shown


def test_a_target_can_be_a_path_with_odd_characters(root, tmp_path):
    odd = tmp_path / "a b\n'\"$x"
    odd.mkdir()
    prepare_root(root, [Bind(odd)])
    assert Path(str(root) + str(odd)).is_dir()


def test_a_place_below_a_link_is_made_in_the_root(root, tmp_path):
    prepare_root(root, [Bind(tmp_path, "/var/run/deep/er")])
    assert (root / "run/deep/er").is_dir()
