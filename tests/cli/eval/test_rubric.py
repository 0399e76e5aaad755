"""``rollout eval rubric``, with judges at a scripted endpoint in another thread."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import pytest
import trio
from integrations.scripted import refuse, say, scripted_endpoint

from rollout.trajectory import build_trajectory

ASKED = [{"role": "user", "content": "6 + 7?"}, {"role": "assistant", "content": "13"}]
KEY = "key-of-the-judge"


@contextmanager
def endpoint_of(script):
    """Serve a script while this thread runs a command."""
    ready, served = threading.Event(), []

    async def serve():
        async with scripted_endpoint(script) as endpoint:
            stop = trio.Event()
            served.extend([endpoint, stop, trio.lowlevel.current_trio_token()])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(20)
    endpoint, stop, token = served
    try:
        yield endpoint
    finally:
        token.run_sync_soon(stop.set)
        thread.join(20)


def answer(request):
    text = request.body["messages"][1]["content"]
    if "refuse me" in text:
        return refuse(500, "down")
    score = (0.5 if request.body["model"] == "strict" else 1) if "13" in text else 0
    return say(json.dumps({"correct": {"reason": "r", "score": score}}))


@pytest.fixture
def rubric(tmp_path):
    path = tmp_path / "rubric.json"
    criteria = [{"name": "correct", "description": "The answer is right."}]
    judges = [{"model": "kind"}, {"model": "strict"}]
    path.write_text(json.dumps({"criteria": criteria, "judges": judges}))
    return str(path)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "said.jsonl"
    wrong = [ASKED[0], {"role": "assistant", "content": "no idea"}]
    rows = [{"id": "right", "messages": ASKED, "label": "13"}, {"messages": wrong}]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def test_lines_and_a_trajectory(cli, rubric, lines, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    document = tmp_path / "one.json"
    document.write_text(json.dumps(build_trajectory(ASKED, rollout_id="r")))
    with endpoint_of(answer) as endpoint:
        sources = (str(lines), str(document))
        options = ("--url", endpoint.url, "--api-key-env", "JUDGE_KEY")
        done = cli("eval", "rubric", rubric, *sources, *options, "--json")
        shown = cli("eval", "rubric", rubric, *sources, *options)
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [item["id"] for item in found["items"]] == ["right", f"{lines}:3", str(document)]
    assert [item["score"] for item in found["items"]] == [0.75, 0, 0.75]
    assert found["items"][0]["verdicts"][1]["criteria"]["correct"]["score"] == 0.5
    row = found["statistics"]["criteria"]["correct"]
    assert (row["mean"], row["disagreement"]) == (0.5, pytest.approx(1 / 3))
    assert 0 < row["alpha"] < 1
    assert {request.key for request in endpoint.requests} == {KEY}
    assert shown.exit_code == 0
    assert "3 conversations judged" in shown.stdout
    assert "0.500" in shown.stdout


def test_a_run(cli, rubric, finished):
    with endpoint_of(answer) as endpoint:
        done = cli("eval", "rubric", rubric, str(finished), "--url", endpoint.url, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["statistics"]["judged"] == len(found["items"]) > 4


def test_one_that_cannot_be_judged(cli, rubric, lines):
    with lines.open("a") as file:
        file.write(json.dumps({"id": "bad", "messages": [{"content": "refuse me"}]}))
    with endpoint_of(answer) as endpoint:
        done = cli("eval", "rubric", rubric, str(lines), "--url", endpoint.url, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["items"][2]["error"]["type"] == "JudgeRefusedError"
    assert done.stderr.startswith("bad: the judge ")
    assert done.stderr.endswith("1 of 3 conversations could not be judged\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "said.jsonl:1: "),
        ("[]", "said.jsonl:1: messages must be a list of objects"),
        ('{"messages": [], "label": 3}', "said.jsonl:1: label must be a string or null"),
        ("", "there is no conversation to judge"),
    ],
)
def test_lines_that_are_wrong(cli, rubric, lines, text, said):
    lines.write_text(text)
    done = cli("eval", "rubric", rubric, str(lines), "--url", "http://127.0.0.1:1/v1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_wrong_use(cli, rubric, lines, tmp_path):
    (tmp_path / "t.json").write_text("{}")
    url = ("--url", "http://127.0.0.1:1/v1")
    for arguments, said in (
        ((rubric, str(lines)), "the judge kind has no url; give --url"),
        ((rubric, str(lines), "--api-key-env", "K"), "--api-key-env needs --url"),
        ((rubric, str(lines), "--url", "here"), "--url must start with http"),
        (("none.toml", str(lines)), "none.toml: No such file"),
        ((rubric, "none.jsonl", *url), "none.jsonl cannot be read: No such file"),
        ((rubric, str(tmp_path / "t.json"), *url), "t.json: "),
        ((rubric, str(tmp_path), *url), str(tmp_path)),
    ):
        done = cli("eval", "rubric", *arguments)
        assert (done.exit_code, done.stdout) == (2, ""), arguments
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
