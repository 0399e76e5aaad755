"""``rollout eval run --live``: what its server answers, and when it ends."""

from __future__ import annotations

import json
import re
import socket
from types import SimpleNamespace

import httpx
import pytest
import trio
from evaluation.report.runs import RunFolder, record

from rollout.cli.eval.live import LivePage, live_page
from rollout.cli.failures import CommandError
from rollout.evaluation.opening import EvaluationProgress
from rollout.evaluation.report import write_report


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run", rows=1, n=2)
    folder.add(record(0, 0, reward=1.0, passed=True), {"steps": []})
    folder.write(metrics=False)
    progress = EvaluationProgress(total=2, in_flight=1)
    progress.add(folder.records[0])
    return SimpleNamespace(
        folder=folder.folder, manifest=folder.manifest, progress=progress, complete=False
    )


async def opened(http: httpx.AsyncClient) -> None:
    """Wait, as a browser does, until there is a page."""
    while "getting ready" in (await http.get("/")).text:
        await trio.sleep(0.01)


async def news(http: httpx.AsyncClient, start: int = 0, **more: str) -> tuple[dict, list[dict]]:
    answer = await http.get("/news", params={"page": "p", "from": start, **more})
    state, *rows = map(json.loads, answer.text.splitlines())
    return state, rows


async def test_pages_get_what_is_new_and_the_report_at_the_end(run):
    async with httpx.AsyncClient() as http:
        async with live_page("127.0.0.1:0") as (page, url):
            http.base_url = httpx.URL(url)
            assert (await http.get("/news?from=0")).status_code == 404
            assert (await http.get("/attempt/0-0")).status_code == 404
            page.begin(run)
            await opened(http)
            state, (row,) = await news(http)
            assert (row["row"], row["reward"]) == (0, 1.0)
            assert {name: state[name] for name in ("total", "settled", "in_flight", "over")} == {
                "total": 2,
                "settled": 1,
                "in_flight": 1,
                "over": None,
            }
            assert (await news(http, state["next"]))[1] == []
            assert (await http.get("/attempt/0-0")).json()["record"]["id"] == "r-0-0-0"
            assert (await http.get("/attempt/0-1")).status_code == 404
            assert (await http.get("/trajectories/0-0-0.json")).json() == {"steps": []}
            assert (await http.get("/report.html")).status_code == 404
            run.complete = True
            write_report(run.folder)

            async def last() -> None:
                while (await news(http, state["next"], wait=""))[0]["over"] != "complete":
                    pass
                report = (run.folder / "report.html").read_bytes()
                assert (await http.get("/report.html")).content == report
                await http.get("/bye?page=p")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(last)
                await page.linger()
        with pytest.raises(httpx.ConnectError):
            await http.get("/")


async def test_a_run_that_nobody_looks_at_ends_at_once(run, autojump_clock):
    page = LivePage()
    page.begin(run)
    await page.linger()
    assert trio.current_time() == 0
    page.close()


async def test_pages_that_were_closed_are_not_waited_for(run, autojump_clock):
    page = LivePage()
    page.begin(run)
    page._lookers["p"] = trio.current_time()
    await page.linger()
    assert 0 < trio.current_time() <= 10
    page.close()


async def test_other_names_and_paths_are_refused(run):
    async with live_page("127.0.0.1:0") as (page, url), httpx.AsyncClient(base_url=url) as http:
        page.begin(run)
        (run.folder / "secret").write_text("secret")
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            answer = await http.get("/", headers={"Host": host})
            assert answer.status_code == 421
        assert (await http.get("/", headers={"Host": "localhost:1"})).status_code == 200
        for path in ("..%2fsecret", "%2e%2e/secret", "..%5csecret", "missing.json"):
            assert (await http.get(f"/trajectories/{path}")).status_code == 404
        assert (await http.get("/news?from=-1")).status_code == 404
        assert (await http.get("/nowhere")).status_code == 404
        assert (await http.post("/")).status_code == 405


async def test_a_damaged_journal_is_said_and_the_run_goes_on(run):
    async with live_page("127.0.0.1:0") as (page, url), httpx.AsyncClient(base_url=url) as http:
        page.begin(run)
        await opened(http)
        with (run.folder / "events.jsonl").open("ab") as file:
            file.write(b"{}\n")
        while (trouble := (await news(http, wait=""))[0]["trouble"]) is None:
            pass
        assert "does not fit its checksum" in trouble
        await http.get("/bye?page=p")


async def test_an_error_of_the_block_comes_out_plain():
    with pytest.raises(CommandError, match="broken"):
        async with live_page("127.0.0.1:0"):
            raise CommandError("broken")


def test_the_command_says_where_and_leaves_the_report(cli, files):
    config = files.config(files.rows({}, {"answer": "41"}))
    done = cli("eval", "run", str(config), "--live", "--json")
    assert re.fullmatch(r"live report: http://127\.0\.0\.1:\d+\n", done.stderr)
    assert json.loads(done.stdout)["complete"]
    assert (files.output / "report.html").is_file()


def test_a_port_in_use(cli, files):
    config = files.config(files.rows({}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = cli.fails(2, "eval", "run", str(config), "--live-bind", address)
    assert f"cannot listen on {address}: Address already in use" in line
    assert "--live-bind" in line
    assert not files.output.exists()


@pytest.mark.parametrize("bind", ["0.0.0.0:8080", "[::]:8080", "192.0.2.1:8080", "host:8080"])
def test_other_machines_are_kept_out(cli, files, bind):
    config = files.config(files.rows({}))
    assert "this machine alone" in cli.fails(2, "eval", "run", str(config), "--live-bind", bind)
