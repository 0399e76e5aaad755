"""What metadata may say about a task, and what it may not make git do."""

from __future__ import annotations

import re

import pytest

from rollout.backend.harbor.tasks.references import (
    credentials_of,
    parse_task,
    without_credentials,
)
from rollout.errors import InvalidFieldError

URL = "https://example.com/team/tasks.git"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(**fields):
    return {"git_url": URL, "path": "tasks/add"} | fields


def refused(value, field="metadata.harbor_task", **options):
    with pytest.raises(InvalidFieldError) as caught:
        parse_task(value, **options)
    assert caught.value.field == field
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("org/name", {"name": "org/name"}),
        ("org/name@latest", {"name": "org/name", "ref": "latest"}),
        ("org/name@sha256:0a1b", {"name": "org/name", "ref": "sha256:0a1b"}),
        ({"name": "o.r_g-1/n", "ref": "3"}, {"name": "o.r_g-1/n", "ref": "3"}),
        ({"name": "org/name", "ref": None}, {"name": "org/name"}),
        ("./tasks/add", "tasks/add"),
        ("/srv/tasks/add", "/srv/tasks/add"),
        ({"path": "add"}, "add"),
        (git(), git()),
        (git(git_commit_id=None), git()),
        (git(git_commit_id=COMMIT), git(git_commit_id=COMMIT)),
    ],
)
def test_forms(value, expected):
    found = parse_task(value)
    assert (found if isinstance(found, str) else found.source) == expected


@pytest.mark.parametrize(
    "value",
    [None, 7, [], {}, "", "add", "a/b/c", "a//b", "-a/b", "a/-b", "a/b@", "a/b@c@d", "a/b@-x",
     "../b", "a/..", "org/na..me", "org/name\n", "~/x", "https://example.com/x",
     {"path": "a", "other": 1}, {"name": "a/b", "path": "a"}, {"other": 1},
     git(depth=1)],
)  # fmt: skip
def test_no_form_at_all(value):
    with pytest.raises(InvalidFieldError) as caught:
        parse_task(value)
    assert caught.value.field.startswith("metadata.harbor_task")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"path": 7}, "path"),
        ({"path": ""}, "path"),
        ({"path": "a/../../b"}, "path"),
        ({"name": "name"}, "name"),
        ({"name": "--x/y"}, "name"),
        ({"ref": "1"}, "name"),
        ({"name": "a/b", "ref": "--x"}, "ref"),
        ({"name": "a/b", "ref": 3}, "ref"),
        ({"git_url": URL}, "path"),
        ({"git_commit_id": COMMIT, "path": "a"}, "git_url"),
        (git(path="../a"), "path"),
        (git(path="/a"), "path"),
        (git(path="--stdin"), "path"),
        (git(path="a\nb"), "path"),
        (git(path=""), "path"),
        (git(git_commit_id="--upload-pack=touch /tmp/x"), "git_commit_id"),
        (git(git_commit_id="-x"), "git_commit_id"),
        (git(git_commit_id="a b"), "git_commit_id"),
        (git(git_commit_id="a..b"), "git_commit_id"),
        (git(git_commit_id="+refs/heads/x:refs/heads/y"), "git_commit_id"),
        (git(git_commit_id=""), "git_commit_id"),
        (git(git_commit_id=7), "git_commit_id"),
    ],
)
def test_an_error_names_its_field(value, field):
    refused(value, f"metadata.harbor_task.{field}")


@pytest.mark.parametrize(
    "url",
    [
        "--upload-pack=touch /tmp/x",
        "-c",
        "ext::sh -c touch% /tmp/x",
        "ssh://-oProxyCommand=touch/x",
        "ssh://-x@host/x",
        "git@-oProxyCommand=x:y",
        "git@host:-x",
        "git@host:",
        "git://example.com/x",
        "http://example.com/x",
        "ftp://example.com/x",
        "https:/example.com/x",
        "https://",
        "https://example.com",
        "https://example.com/",
        "https://example.com:port/x",
        "https://exa mple.com/x",
        "https://example.com/x\n--upload-pack=y",
        "HTTPS://[::1/x",
        "https::https://example.com/x",
        "file:///srv/x",
        "/srv/x",
        "./x",
        "C:/x",
        "",
        None,
        7,
    ],
)
def test_urls_that_git_must_not_see(url):
    refused(git(git_url=url), "metadata.harbor_task.git_url")


@pytest.mark.parametrize(
    "url",
    [URL, "https://u:p@example.com:8443/x", "ssh://git@example.com:22/x.git",
     "git@example.com:team/x.git", "https://[::1]/x", "https://exa_mple.com/x"],
)  # fmt: skip
def test_urls_that_git_may_see(url):
    assert parse_task(git(git_url=url)).source["git_url"] == url


def test_repositories_of_this_machine():
    for url in ("file:///srv/x", "/srv/x"):
        refused(git(git_url=url), "metadata.harbor_task.git_url")
        assert parse_task(git(git_url=url), allow_local_git=True).source["git_url"] == url
    for url in ("./x", "x", "--x", "ext::sh"):
        refused(git(git_url=url), "metadata.harbor_task.git_url", allow_local_git=True)


SECRETS = ["https://robot:hunter2%21@example.com/x?token=t0ken", "https://gh0-t0ken@example.com/x"]


@pytest.mark.parametrize("url", SECRETS)
def test_no_credentials_in_names_and_reprs(url):
    task = parse_task(git(git_url=url, git_commit_id="main"))
    shown = f"{task!r} {without_credentials(url)}"
    assert not re.search("hunter|t0ken|robot", shown)
    assert task.name == "https://example.com/x@main:tasks/add"


@pytest.mark.parametrize("url", [url.replace("https", "http") for url in SECRETS] + SECRETS)
def test_no_credentials_in_errors(url):
    with pytest.raises(InvalidFieldError) as caught:
        parse_task(git(git_url=url, git_commit_id="--x"))
    assert not re.search("hunter|t0ken|robot", str(caught.value))


def test_credentials_of_a_url():
    assert credentials_of(URL) == []
    assert credentials_of("git@example.com:x") == []
    found = credentials_of("https://robot:hunter2%21@example.com/x")
    assert {"robot:hunter2%21", "robot:hunter2!", "hunter2%21", "hunter2!", "robot"} <= set(found)
    assert "git" not in credentials_of("ssh://git:pass1234@example.com/x")
