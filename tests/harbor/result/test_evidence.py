"""The kept files of a trial are checked against their manifest."""

import json
import os

import pytest

from rollout.backend.harbor import verify_trial_evidence
from rollout.backend.harbor.result.evidence import MANIFEST, write_manifest
from rollout.errors import EvidenceError


@pytest.fixture
def kept(tmp_path):
    """Files as a trial leaves them, and their manifest."""
    for name in ("result.json", "agent/log.txt", "agent/manifest.json", "artifacts/not-part.txt"):
        path = tmp_path / "harbor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    write_manifest(tmp_path / "harbor", "r", without=("artifacts",))
    (tmp_path / "harbor" / "artifacts" / "not-part.txt").unlink()
    return tmp_path / "harbor"


def test_files_as_they_were(kept):
    manifest = verify_trial_evidence(kept, "r")
    assert manifest["complete"] is True
    assert [entry["path"] for entry in manifest["files"]] == [
        "agent/log.txt", "agent/manifest.json", "result.json"
    ]  # fmt: skip
    assert manifest["files"][0] == {
        "path": "agent/log.txt",
        "size_bytes": 13,
        "sha256": "298cba5db35e92c8c786ea7b02317e68b9622d5c8c23bef0fbf707deb93882e4",
    }
    kept.rename(kept.with_name("copy"))
    assert verify_trial_evidence(str(kept.with_name("copy")), "r") == manifest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kept: (kept / "agent/log.txt").unlink(), "are missing.*: agent/log.txt"),
        (lambda kept: (kept / "agent/log.txt").write_text("agent/LOG.txt"), "changed.*: agent/log"),
        (lambda kept: (kept / "agent/more").write_text(""), "were added.*: agent/more"),
        (lambda kept: (kept / MANIFEST).unlink(), "cannot be read"),
        (lambda kept: (kept / MANIFEST).write_text("{"), "cannot be read"),
        (lambda kept: (kept / MANIFEST).write_text("[]"), "not of schema"),
        (lambda kept: said(kept, files=[{}]), "damaged"),
        (lambda kept: said(kept, files=None), "damaged"),
        (lambda kept: said(kept, files=[]), "were added"),
        (lambda kept: said(kept, schema_version="harbor-evidence-v0"), "not of schema"),
        (lambda kept: said(kept, complete=False, errors=["a: gone"]), r'incomplete: \["a: gone"\]'),
    ],
)
def test_files_that_are_not(kept, change, words):
    change(kept)
    with pytest.raises(EvidenceError, match=words):
        verify_trial_evidence(kept, "r")


def said(kept, **fields):
    manifest = json.loads((kept / MANIFEST).read_text())
    (kept / MANIFEST).write_text(json.dumps(manifest | fields))


def test_evidence_of_another_rollout(kept):
    with pytest.raises(EvidenceError, match="of rollout 'r', not of 'other'"):
        verify_trial_evidence(kept, "other")


def test_a_trial_without_a_result_is_incomplete(kept):
    (kept / "result.json").unlink()
    write_manifest(kept, "r")
    with pytest.raises(EvidenceError, match=r"incomplete.*result\.json: Harbor wrote none"):
        verify_trial_evidence(kept, "r")


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_links_are_part_of_it(kept):
    (kept / "latest").symlink_to("agent")
    write_manifest(kept, "r")
    assert {"path": "latest", "link": "agent"} in verify_trial_evidence(kept, "r")["files"]
    (kept / "latest").unlink()
    (kept / "latest").symlink_to("verifier")
    with pytest.raises(EvidenceError, match=r"changed.*: latest"):
        verify_trial_evidence(kept, "r")
