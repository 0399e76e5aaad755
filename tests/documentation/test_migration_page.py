"""What the page on moving over promises to callers of the official package."""

from __future__ import annotations

import re

import pytest
import trio
from documentation.blocks import ROOT, SDK, defined_by, find
from documentation.serving import chat_endpoint
from support import Script, local_backend, make_app, prompt, served

from rollout.client import RolloutClient

MIGRATION = "docs/migration.md"


def test_what_the_old_caller_imports_is_here_under_the_new_name():
    old = find(MIGRATION, "asyncio.run(main", "py").code
    imports = re.findall(r"^from osmosis_ai\.(rollout[.\w]*) import (.+)$", old, re.MULTILINE)
    assert len(imports) == 2
    for module, names in imports:
        exec(f"from {module} import {names}", {})


async def test_both_callers_that_moved_over():
    app = defined_by(find(SDK, "class Solve"))["app"]
    main = defined_by(find(MIGRATION, "trio.Semaphore(64)"))["main"]
    run_questions = defined_by(find(MIGRATION, "async def run_questions"))["run_questions"]
    questions = {f"moved-{number}": f"What is {number} + 1?" for number in range(5)}
    again = {f"again-{name}": question for name, question in questions.items()}
    async with chat_endpoint() as chat_url, served(app) as url:
        first = await main(questions, chat_url, url)
        async with RolloutClient(url=url) as client:
            second = await run_questions(client, again, chat_url)
    for results in (first, second):
        answers = [results[name].sample.messages[-1]["content"] for name in sorted(results)]
        assert answers == [f"{number} + 1 = {number + 1}" for number in range(5)]


async def test_handles_are_awaited_one_after_the_other():
    all_of = defined_by(find(MIGRATION, "async def all_of"))["all_of"]
    async with served(make_app(local_backend(Script))) as url, RolloutClient(url=url) as client:
        handles = [
            await client.run_rollout_async(prompt(answer=name), "http://x", name, grade=False)
            for name in "abc"
        ]
        results = await all_of(handles)
    assert [result.sample.messages[-1]["content"] for result in results] == ["a", "b", "c"]


def test_what_pydantic_did():
    made = defined_by(find(MIGRATION, "class SolverConfig"))
    assert (made["config"].name, made["config"].attempts, made["config"].model) == (
        *("solver", 5),
        "policy",
    )
    assert made["result"].status == "success"
    assert made["body"]["rollout_id"] == "a"


NAMES = re.findall(r"\btrio\.[a-z_.]*\w+", (ROOT / MIGRATION).read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_what_trio_has_instead_exists(name):
    found = trio
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)
