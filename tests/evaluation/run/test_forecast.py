"""What a run is about to take."""

from __future__ import annotations

import pytest
from attrs import evolve
from evaluation.run.cases import config_of, run_all, scripted
from evaluation.run.fake import success

from rollout.cli.eval.progress import forecast_line
from rollout.evaluation import Forecast, PricesConfig


def answering(usage):
    async def end(rollout):
        result = success()
        if usage is not None:
            result["sample"]["messages"][-1]["usage"] = usage
        return result

    return end


async def forecast_of(config, **options) -> list[Forecast]:
    seen = []

    async def before_start(forecast):
        seen.append(forecast)

    await run_all(config, before_start=before_start, **options)
    return seen


PRICES = PricesConfig(prompt=2.5, completion=10, currency="USD")
USAGE = {"prompt_tokens": 1000, "completion_tokens": 50}


async def test_by_the_attempts_on_record(tmp_path, server):
    server.end = answering(USAGE)
    first = config_of(tmp_path, server="http://fake", rows=scripted(4), dataset={"limit": 1})
    assert await forecast_of(first) == [Forecast(rollouts=1)]
    assert await forecast_of(first) == []

    more = evolve(config_of(tmp_path, server="http://fake", n=2), prices=PRICES)
    (forecast,) = await forecast_of(more)
    assert forecast == Forecast(
        rollouts=7,
        attempts=1,
        prompt_tokens=7000,
        completion_tokens=350,
        cost=(7000 * 2.5 + 350 * 10) / 1e6,
        currency="USD",
    )
    (again,) = await forecast_of(more, fresh=True)
    assert (again.rollouts, again.attempts, again.prompt_tokens) == (8, 8, 8000)


async def test_attempts_without_tokens_say_nothing(tmp_path, server):
    server.end = answering(None)
    config = evolve(config_of(tmp_path, server="http://fake", rows=scripted(2)), prices=PRICES)
    await run_all(config)
    assert await forecast_of(config, fresh=True) == [Forecast(rollouts=2)]


async def test_what_it_raises_starts_nothing_and_moves_nothing(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(1))
    run, _ = await run_all(config)

    async def before_start(_):
        raise LookupError

    with pytest.raises(LookupError):
        await run_all(config, fresh=True, before_start=before_start)
    assert not (run.folder / "archive").exists()
    assert (await run_all(config))[1] == []
    assert server.tries.total() == 1


async def test_a_damaged_run_that_is_replaced_is_no_trouble(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(1))
    run, _ = await run_all(config)
    (run.folder / "events.jsonl").write_bytes(b"x\ny\n")
    assert await forecast_of(config, fresh=True) == [Forecast(rollouts=1)]


@pytest.mark.parametrize(
    ("more", "most", "line"),
    [
        ({}, False, "1,200 rollout(s); no attempt on record tells how many tokens"),
        (
            {"prompt_tokens": 1_234_567.0, "completion_tokens": 98.7, "attempts": 12},
            True,
            (
                "up to 1,200 rollout(s), about 1,200,000 prompt and 99 completion tokens "
                "(by 12 attempt(s) on record)"
            ),
        ),
        (
            {
                "prompt_tokens": 1000.0,
                "completion_tokens": 0.0,
                "attempts": 1,
                "cost": 1234.5,
                "currency": "EUR",
            },
            False,
            (
                "1,200 rollout(s), about 1,000 prompt and 0 completion tokens, about 1,234.50 EUR "
                "(by 1 attempt(s) on record)"
            ),
        ),
    ],
)
def test_its_line(more, most, line):
    assert forecast_line(Forecast(rollouts=1200, **more), most=most) == line
