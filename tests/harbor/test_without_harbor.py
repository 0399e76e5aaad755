"""Where Harbor is missing, or Python is too old for it, a backend says so when it is made."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from rollout.backend.harbor import HarborBackend, validation
from rollout.backend.harbor.namespace import NamespaceEnvironment
from rollout.backend.harbor.validation import has_harbor
from rollout.errors import BackendConfigurationError


def python(monkeypatch, *version):
    told = SimpleNamespace(version_info=version, version=".".join(map(str, version)) + " (main)")
    monkeypatch.setattr(validation, "sys", told)


def test_a_python_that_is_too_old(monkeypatch):
    python(monkeypatch, 3, 11, 9)
    with pytest.raises(BackendConfigurationError) as caught:
        HarborBackend(agent="oracle")
    assert str(caught.value) == "HarborBackend needs Python 3.12 or newer; this is 3.11.9"


def test_no_harbor(monkeypatch):
    python(monkeypatch, 3, 12, 0)
    monkeypatch.setattr(validation, "has_harbor", lambda: False)
    with pytest.raises(BackendConfigurationError) as caught:
        HarborBackend(agent="oracle")
    assert str(caught.value) == 'HarborBackend needs Harbor: pip install "trio-rollout[harbor]"'


def test_what_is_missing_is_told_before_what_is_wrong(monkeypatch):
    python(monkeypatch, 3, 11, 0)
    with pytest.raises(BackendConfigurationError, match="needs Python"):
        HarborBackend(agent="no such agent", tasks_dir="/no/such/folder", environment=7)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python is not too old for Harbor")
def test_this_python():
    with pytest.raises(BackendConfigurationError, match=r"needs Python 3\.12"):
        HarborBackend(agent="oracle")


@pytest.mark.skipif(has_harbor(), reason="Harbor is here")
def test_the_environment():
    with pytest.raises(BackendConfigurationError, match="needs Harbor: pip install"):
        NamespaceEnvironment()


def test_the_package_can_be_imported():
    script = (
        "import sys; sys.modules['harbor'] = None\n"
        "import rollout.backend.harbor as room\n"
        "for name in room.__all__: getattr(room, name)\n"
        "import rollout.backend.harbor.namespace\n"
        "try: room.HarborBackend(agent='oracle')\n"
        "except room.HarborBackend.execute.__globals__['BackendConfigurationError'] as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("HarborBackend needs ")
