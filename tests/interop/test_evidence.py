"""The official package checks the kept files of our trials, and we check those of its own."""

from __future__ import annotations

import importlib

import pytest

from rollout.backend.harbor import verify_trial_evidence
from rollout.backend.harbor.result.evidence import write_manifest
from rollout.errors import EvidenceError


@pytest.fixture
def kept(tmp_path):
    for name, text in {"result.json": "{}", "agent/log.txt": "done", "trial.log": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def official(kept):
    module = importlib.import_module("osmosis_ai.rollout.utils.evidence")
    return module.verify_trial_evidence(kept, "r")


def test_ours_by_the_official_check(kept):
    write_manifest(kept, "r")
    assert official(kept) == verify_trial_evidence(kept, "r")
    (kept / "agent" / "log.txt").write_text("gone")
    with pytest.raises(ValueError, match="checksum"):
        official(kept)
    with pytest.raises(EvidenceError, match="changed"):
        verify_trial_evidence(kept, "r")


def test_its_own_by_ours(kept, tmp_path_factory):
    module = importlib.import_module("osmosis_ai.rollout.backend.harbor.evidence")
    root = tmp_path_factory.mktemp("root").resolve()
    assert module.retain_trial_evidence(kept, root, "r", process_id="p")
    assert verify_trial_evidence(root / "r" / "harbor", "r") == official(root / "r" / "harbor")
    (root / "r" / "harbor" / "logs" / "more.txt").write_text("")
    with pytest.raises(EvidenceError, match=r"added.*: logs/more\.txt"):
        verify_trial_evidence(root / "r" / "harbor", "r")
