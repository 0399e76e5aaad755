"""The trajectories of rollouts that have ended: who gets one, in which form, and why not."""

from __future__ import annotations

import errno
import gzip
import os

import pytest
import trio
from server.faults import (
    API_KEY,
    admit,
    assert_refused,
    finished,
    result_path,
    served_http,
)
from support import make_app, prompt

from rollout._files.folders import Folder
from rollout._files.rollouts import RolloutFolders
from rollout.types import POLLING_LEASE_HEADER

pytestmark = pytest.mark.usefixtures("log_lines")

PLAIN = {"Accept-Encoding": "identity"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path / "files"))
    return tmp_path / "files"


def path_of(rollout_id):
    return result_path(rollout_id).removesuffix("result") + "trajectory"


async def get(http, rollout, **headers):
    rollout_id, lease = rollout
    return await http.get(path_of(rollout_id), headers={**lease, **headers})


async def test_it_is_the_file_as_it_was_written(root):
    async with served_http(make_app(api_key=API_KEY)) as http:
        http.headers["Authorization"] = f"Bearer {API_KEY}"
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        answer = await get(http, rollout, **PLAIN)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["vary"] == "Accept-Encoding"
        assert "content-encoding" not in answer.headers
        assert answer.content == (root / "r" / "trajectory.json").read_bytes()
        assert answer.json()["extra"]["status"] == "success"


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [("gzip, deflate", True), ("*", True), ("br", False), ("gzip;q=0", False), ("", False)],
)
async def test_it_is_compressed_for_who_accepts_that(root, accepted, compressed):
    async with served_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(answer="42 " * 50_000))
        await finished(http, *rollout)
        request = http.build_request(
            "GET", path_of(rollout[0]), headers={**rollout[1], "Accept-Encoding": accepted}
        )
        answer = await http.send(request, stream=True)
        data = b"".join([piece async for piece in answer.aiter_raw()])
        await answer.aclose()
    assert answer.headers.get("content-encoding") == ("gzip" if compressed else None)
    assert int(answer.headers["content-length"]) == len(data)
    written = (root / rollout[0] / "trajectory.json").read_bytes()
    assert (gzip.decompress(data) if compressed else data) == written
    assert (len(data) < len(written) / 10) is compressed


async def test_whoever_may_not_poll_gets_none(root):
    async with served_http(make_app(api_key=API_KEY)) as http:
        key = {"Authorization": f"Bearer {API_KEY}"}
        http.headers.update(key)
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        lease = POLLING_LEASE_HEADER
        assert_refused(await http.get(path_of("r"), headers={lease: "wrong"}), 403)
        assert_refused(await http.get(path_of("r")), 422)
        assert_refused(await http.get(path_of("r"), headers={lease: ""}), 422)
        assert assert_refused(await get(http, ("unknown", rollout[1])), 404) == "unknown rollout_id"
        assert (await http.head(path_of("r"), headers=rollout[1])).status_code == 405
        assert_refused(await http.post(path_of("r"), headers=rollout[1]), 405)
        del http.headers["Authorization"]
        assert_refused(await get(http, rollout), 401)


async def test_there_is_none_before_the_end(root):
    async with served_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=600))
        said = assert_refused(await get(http, rollout), 409)
        assert said == "the rollout has not ended, so it has no trajectory yet"
        await http.post("/rollout/cancel", json={"ids": [rollout[0]]})
        await finished(http, *rollout)
        assert (await get(http, rollout)).json()["extra"]["status"] == "cancelled"


async def test_a_lease_that_has_ended_still_gets_what_was_written(root):
    app = make_app(result_wait_timeout_sec=0.05, polling_lease_timeout_sec=0.1)
    async with served_http(app) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=600))
        while app.registry.lifecycle.active_rollouts:
            await trio.sleep(0.01)
        document = (await get(http, rollout)).json()
    assert document["extra"]["error"]["category"] == "lease_expired"


async def test_a_server_that_keeps_no_files_says_so():
    async with served_http(make_app()) as http:
        rollout = await admit(http)
        await finished(http, *rollout)
        said = assert_refused(await get(http, rollout), 404)
    assert said == "this server keeps no files of rollouts"


@pytest.mark.parametrize("name", ["trajectory.json", "diagnostics.json", ""])
async def test_files_that_were_removed(root, name):
    async with served_http(make_app()) as http:
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        if name:
            (root / "r" / name).unlink()
        else:
            root.rename(root.with_name("elsewhere"))
        said = assert_refused(await get(http, rollout), 404)
        assert said.startswith("no trajectory of this rollout is in the folder of the server")
        assert not (root / "r").exists() or name


async def test_files_of_an_earlier_rollout_of_the_same_id_are_not_this_ones(root):
    async with served_http(make_app(result_retention_sec=0)) as http:
        await finished(http, *await admit(http, rollout_id="r"))
    old = {each.name: each.read_bytes() for each in (root / "r").iterdir()}
    async with served_http(make_app()) as http:
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        assert (await get(http, rollout)).status_code == 200
        for name, data in old.items():
            (root / "r" / name).write_bytes(data)
        assert_refused(await get(http, rollout), 404)


@pytest.mark.parametrize("place", ["folder", "file", "fifo"])
async def test_nothing_outside_of_the_folder_is_read(root, tmp_path, place):
    secret = tmp_path / "secret"
    secret.write_text('{"secret": 1}')
    async with served_http(make_app()) as http:
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        folder = root / "r"
        if place == "folder":
            folder.rename(tmp_path / "moved")
            folder.symlink_to(tmp_path / "moved")
        else:
            (folder / "trajectory.json").unlink()
            if place == "file":
                (folder / "trajectory.json").symlink_to(secret)
            else:
                os.mkfifo(folder / "trajectory.json")
        assert_refused(await get(http, rollout), 503)


async def test_storage_that_fails_is_for_later(root, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    async with served_http(make_app()) as http:
        rollout = await admit(http)
        await finished(http, *rollout)
        monkeypatch.setattr(Folder, "read", fails)
        answer = await get(http, rollout)
        said = assert_refused(answer, 503)
        assert said == "the files of the rollout cannot be read: Input/output error"
        assert "retry-after" in answer.headers


async def test_a_file_beyond_the_bound_is_not_read(root, monkeypatch):
    monkeypatch.setattr("rollout.server.trajectories._LARGEST", 1024 * 1024)
    async with served_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(answer="x" * 1024 * 1024))
        await finished(http, *rollout)
        assert "it is larger than 1 MiB" in assert_refused(await get(http, rollout), 503)


async def test_a_restarted_server_has_it_as_it_has_the_result(root, tmp_path):
    async with served_http(make_app(state=tmp_path / "state")) as http:
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        first = await get(http, rollout)
    app = make_app(state=tmp_path / "state")
    async with served_http(app) as http:
        assert_refused(await http.get(path_of("r"), headers={POLLING_LEASE_HEADER: "x"}), 403)
        assert (await get(http, rollout)).json() == first.json()
        assert not app.registry.active_ids
        assert "r" not in app.registry._entries, "it is not kept in memory for that"


@pytest.mark.parametrize("rollout_id", ["Capital", "con.txt", "a b", ".hidden", "x" * 250])
@pytest.mark.parametrize("exact_case", [True, False])
def test_any_id_is_found_and_nothing_is_written_for_that(root, monkeypatch, rollout_id, exact_case):
    monkeypatch.setattr(Folder, "is_case_sensitive", lambda _: exact_case)
    rollouts = RolloutFolders(root)
    files = {"diagnostics.json": b"1", "trajectory.json": b"2"}
    assert rollouts.save(rollout_id, files) == []
    monkeypatch.setattr(Folder, "is_case_sensitive", None)
    assert rollouts.read(rollout_id, [*files], largest=1) == [b"1", b"2"]
    with pytest.raises(FileNotFoundError):
        rollouts.read("other", [*files], largest=1)
