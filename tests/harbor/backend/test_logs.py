"""Harbor's log within the server's: its level, and without keys."""

from __future__ import annotations

import logging

import pytest
from trial_support import KEY

from rollout.types import RolloutStatus

pytestmark = pytest.mark.harbor


def of_harbor(caplog):
    return [record for record in caplog.records if record.name.startswith("harbor.")]


async def test_it_has_the_level_of_the_process(make_task, make_backend, serving, caplog):
    make_task()
    caplog.set_level(logging.WARNING)
    async with serving(make_backend()) as rollouts:
        assert (await rollouts.run(label="42")).status is RolloutStatus.SUCCESS
    assert all(record.levelno >= logging.WARNING for record in of_harbor(caplog))


async def test_all_of_it_is_there_if_wanted(make_task, make_backend, serving, caplog):
    make_task()
    caplog.set_level(logging.DEBUG)
    async with serving(make_backend()) as rollouts:
        assert (await rollouts.run(label="42")).status is RolloutStatus.SUCCESS
    assert {record.levelno for record in of_harbor(caplog)} >= {logging.DEBUG}


@pytest.mark.parametrize("raised", [False, True])
async def test_no_key_is_in_it(make_task, make_backend, serving, caplog, raised, monkeypatch):
    from harbor.trial.trial import Trial

    create = Trial.create

    async def talk(config, **options):
        log = logging.getLogger("harbor.of_a_test")
        try:
            raise RuntimeError(f"key {KEY} refused")
        except RuntimeError:
            log.error("the key is %s", KEY, exc_info=raised)
        return await create(config, **options)

    make_task()
    monkeypatch.setattr(Trial, "create", talk)
    async with serving(make_backend()) as rollouts:
        assert (await rollouts.run(label="42")).status is RolloutStatus.SUCCESS
    assert "the key is [redacted]" in caplog.text
    assert ("key [redacted] refused" in caplog.text) == raised
    assert KEY not in caplog.text


async def test_it_is_as_before_afterwards(make_task, make_backend):
    make_task()
    logger = logging.getLogger("harbor")
    first, second = make_backend(), make_backend()
    async with first.running():
        async with second.running():
            assert not logger.propagate
        assert not logger.propagate
    assert logger.propagate
    assert logger.handlers == []
