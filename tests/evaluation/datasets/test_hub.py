"""Datasets of the Hub: from a cache that is made here, and from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import DatasetError, InvalidBodyError, InvalidFieldError
from rollout.evaluation import DatasetConfig, load_config
from rollout.evaluation.addresses import parse_address
from rollout.evaluation.datasets import open_dataset
from rollout.evaluation.datasets._hub import _chosen
from rollout.evaluation.datasets._place import Place

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ADDRESS = "hf://someone/sums"
SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".parquet")


def line(prompt: str) -> bytes:
    return json.dumps({"user_prompt": prompt}).encode() + b"\n"


# --- addresses and choice: no need of the library ----------------------------------------------


def test_an_address_has_an_owner_a_name_and_perhaps_a_revision():
    assert parse_address("hf://a/b") == ("a/b", None)
    assert parse_address("hf://a/b.c@refs/convert/parquet") == ("a/b.c", "refs/convert/parquet")
    for wrong in (
        "hf://a",
        "hf://a/b/c",
        "hf://datasets/a/b",
        "hf://a/b@",
        "hf://a/b@x y",
        "hf://",
    ):
        assert parse_address(wrong) is None
        with pytest.raises(InvalidFieldError, match="must be hf://OWNER/NAME or"):
            DatasetConfig(path=wrong)
    with pytest.raises(InvalidFieldError, match="must be one hf:// address, or files"):
        DatasetConfig(path=["hf://a/b", "c.jsonl"])
    with pytest.raises(InvalidFieldError, match=r"goes with a dataset of the Hub"):
        DatasetConfig(path="a.jsonl", split="train")


def test_a_config_keeps_an_address_as_it_is(tmp_path):
    config = tmp_path / "eval.toml"
    text = """
        [server]
        url = "http://127.0.0.1:1"
        [chat]
        url = "http://127.0.0.1:1/v1"
        [dataset]
        path = "hf://a/b@main"
        split = "test"
        config = "hard"
        [run]
        output = "out"
        """
    config.write_text(text)
    dataset = load_config(config).dataset
    assert (dataset.path, dataset.location) == ("hf://a/b@main", "hf://a/b@main")
    assert (dataset.split, dataset.config) == ("test", "hard")
    other = load_config(config, {"dataset": {"path": "hf://c/d"}})
    assert (other.dataset.location, other.dataset.split) == ("hf://c/d", "test")
    local = load_config(config, {"dataset": {"path": "x.jsonl"}})
    assert (local.dataset.location, local.dataset.split) == ("x.jsonl", None)
    config.write_text(text.replace("hf://a/b@main", "hf://a"))
    with pytest.raises(InvalidBodyError, match=r"dataset\.path: must be hf://OWNER/NAME"):
        load_config(config)


def chosen(
    names: list[str], configs: Any = None, *, config: str | None = None, split: str | None = None
) -> list[str]:
    return _chosen(
        sorted(names),
        {} if configs is None else {"configs": configs},
        config=config,
        split=split,
        suffixes=SUFFIXES,
        place=Place(ADDRESS),
    )


def refused(*arguments: Any, **named: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        chosen(*arguments, **named)
    return caught.value.reason


NAMES = [".x.jsonl", "README.md", "data/test.csv.bak", "data/test.jsonl", "data/train.jsonl.gz"]
DEEP = ["hard/train-00000-of-00001.parquet", "easy/train.jsonl", "easy/dev_set.jsonl"]


def test_without_metadata_names_say_the_split():
    assert chosen(NAMES, split="test") == ["data/test.jsonl"]
    assert chosen(NAMES, split="train") == ["data/train.jsonl.gz"]
    several = "the dataset has several splits, so set dataset.split: 'test', 'train'"
    assert refused(NAMES) == several
    assert (
        refused(NAMES, split="dev")
        == "the dataset has no split 'dev'; there are none that is named"
    )
    assert chosen(["b.jsonl", "a.jsonl"]) == ["a.jsonl", "b.jsonl"]
    assert chosen(["train/1.jsonl", "train/2.jsonl"]) == ["train/1.jsonl", "train/2.jsonl"]
    assert chosen(["constraint.jsonl", "train.jsonl"], split="train") == ["train.jsonl"]
    assert chosen(DEEP, config="easy", split="dev") == ["easy/dev_set.jsonl"]
    assert chosen(DEEP, config="hard") == [DEEP[0]]
    assert refused(NAMES, config="hard") == "the dataset has no file hard/* with rows"


def test_metadata_says_configs_and_splits():
    files = [{"split": "train", "path": ["a/*.jsonl", "b/**"]}, {"split": "test", "path": "c.csv"}]
    configs = [
        {"config_name": "main", "data_files": files, "default": True},
        {"config_name": "one", "data_files": "a/x.jsonl"},
        {"config_name": "folder", "data_dir": "d"},
    ]
    names = [
        "a/x.jsonl",
        "a/y.jsonl",
        "a/deep/z.jsonl",
        "b/u.jsonl",
        "b/v/w.jsonl",
        "c.csv",
        "d/e.csv",
    ]
    train = ["a/x.jsonl", "a/y.jsonl", "b/u.jsonl", "b/v/w.jsonl"]
    assert chosen(names, configs, split="train") == train
    assert chosen(names, configs, config="main", split="test") == ["c.csv"]
    assert chosen(names, configs, config="one") == ["a/x.jsonl"]
    assert chosen(names, configs, config="folder") == ["d/e.csv"]
    assert refused(names, configs) == (
        "the dataset has several splits, so set dataset.split: 'train', 'test'"
    )
    assert refused(names, configs, split="dev") == (
        "the dataset has no split 'dev'; there are 'train', 'test'"
    )
    assert refused(names, configs, config="two") == (
        "the dataset has no config 'two'; there are 'main', 'one', 'folder'"
    )
    assert refused(names, configs[1:]) == (
        "the dataset has several configs, so set dataset.config: 'one', 'folder'"
    )
    assert (
        refused(["c.csv"], configs, config="one") == "the dataset has no file a/x.jsonl with rows"
    )
    odd = [{"config_name": "default", "data_files": 7}]
    assert refused(names, odd) == "data_files in the README's metadata cannot be read"


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DatasetError, match=r'hf://someone/sums: .*"trio-rollout\[hub\]"'):
        open_dataset(DatasetConfig(path=ADDRESS))


# --- the cache ----------------------------------------------------------------------------------


README = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test.jsonl
---
# Sums
"""
FILES = {
    "README.md": README,
    "data/train-00000-of-00002.jsonl": line("one") + line("two"),
    "data/train-00001-of-00002.jsonl": line("three"),
    "data/test.jsonl": line("four"),
}


def make_cache(cache: Path, files: dict[str, bytes] = FILES) -> Path:
    """Lay files out as the library does: blobs, and a snapshot of links to them."""
    repository = cache / "datasets--someone--sums"
    snapshot = repository / "snapshots" / COMMIT
    for name, data in files.items():
        blob = repository / "blobs" / hashlib.sha256(data).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(blob, path.parent))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def offline(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def prompts(source):
    return [(row.index, row.initial_messages[0]["content"]) for row in source.rows()]


@pytest.mark.parametrize("address", [ADDRESS, f"{ADDRESS}@main", f"{ADDRESS}@{COMMIT}"])
def test_a_split_comes_from_the_cache(offline, address):
    snapshot = make_cache(offline)
    source = open_dataset(DatasetConfig(path=address, split="train"))
    assert source.revision == COMMIT
    assert source.files == tuple(
        snapshot / f"data/train-0000{number}-of-00002.jsonl" for number in (0, 1)
    )
    assert source.scan().rows == 3
    assert prompts(source) == [(0, "one"), (1, "two"), (2, "three")]
    one = open_dataset(DatasetConfig(path=address, split="test"))
    assert one.scan().digest == hashlib.sha256(line("four")).hexdigest()


def test_what_the_cache_lacks(offline):
    with pytest.raises(DatasetError, match=r"sums: is not in the cache, or not all of it"):
        open_dataset(DatasetConfig(path=ADDRESS, split="train"))
    make_cache(offline, dict(list(FILES.items())[:2]))
    with pytest.raises(DatasetError, match=r"has 1 of the 2 files data/train-\*-of-00002\.jsonl"):
        open_dataset(DatasetConfig(path=ADDRESS, split="train"))
    with pytest.raises(DatasetError, match="is not in the cache"):
        open_dataset(DatasetConfig(path=f"{ADDRESS}@v2", split="train"))


# --- a hub --------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a download takes."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(
            ("/api/datasets/someone/sums/revision/main", "/api/datasets/someone/sums")
        ):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "someone/sums", "sha": COMMIT, "siblings": siblings}
            self._answer(json.dumps(info).encode(), "application/json")
            return
        head, found, name = path.partition("/resolve/main/")
        if found and head == "/datasets/someone/sums" and name in FILES:
            self._answer(FILES[name], "application/octet-stream")
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


PROGRAM = """
import sys
from rollout.errors import DatasetError
from rollout.evaluation import DatasetConfig
from rollout.evaluation.datasets import open_dataset
try:
    source = open_dataset(DatasetConfig(path=sys.argv[1], split="train"))
except DatasetError as error:
    sys.exit(str(error))
print(source.revision, *[row.initial_messages[0]["content"] for row in source.rows()])
"""


def test_a_download_fills_the_cache(tmp_path):
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")

    def run(address: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", **more}
        command = [sys.executable, "-c", PROGRAM, address]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            done = run(ADDRESS, HF_ENDPOINT=url)
            missing = run("hf://someone/else", HF_ENDPOINT=url)
        finally:
            server.shutdown()
            thread.join()
    assert done.stdout == f"{COMMIT} one two three\n", done.stderr
    assert "hf://someone/else: there is no such dataset, or it is private" in missing.stderr
    again = run(ADDRESS, HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout, again.stderr
    gone = run(ADDRESS, HF_ENDPOINT=url)
    assert "hf://someone/sums: cannot be downloaded: " in gone.stderr
    assert gone.stderr.count("\n") == 1
