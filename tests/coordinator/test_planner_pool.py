"""Planning beside the scheduler's loop: whatever happens there, somebody hears of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import StorageError
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.planner_pool import PlannerPool


class NoDisk:
    """Graphs that cannot be read."""

    def graphs(self, *hashes: str) -> Any:
        raise StorageError("the disk is gone")


def pool_of(graphs: Any) -> tuple[PlannerPool, list[ev.Event]]:
    posted: list[ev.Event] = []
    return PlannerPool(graphs, posted.append), posted


def test_a_question_that_cannot_be_answered_is_answered_with_why() -> None:
    pool, posted = pool_of(NoDisk())
    plan: Any = SimpleNamespace(dag_hash="d", eval_dag_hash="e", places=())
    empty: Any = SimpleNamespace()
    asyncio.run(pool.judge(do.ChooseLinks("gpt-1", 3, plan, empty, empty)))
    pool.stop()
    assert posted == [ev.LinksFailed("gpt-1", 3, "the disk is gone")]


def test_an_inquiry_hears_why_there_is_no_plan_and_no_job_does() -> None:
    spec: Any = SimpleNamespace(dag_hash="d", eval_dag_hash="e", training=None)
    flops: Any = SimpleNamespace(flops={})

    class Once(NoDisk):
        calls = 0

        def graphs(self, *hashes: str) -> Any:
            self.calls += 1
            return flops if self.calls == 1 else super().graphs(*hashes)

    pool, posted = pool_of(Once())

    async def ask() -> None:
        waiting = asyncio.create_task(pool.inquire(spec, 60.0))
        while not posted:
            await asyncio.sleep(0)
        assert pool.inquired("inquiry-1") is spec
        empty: Any = SimpleNamespace()
        await pool.make_plan(do.MakePlan("inquiry-1", 0, 0, spec, empty))
        with pytest.raises(StorageError, match="disk is gone"):
            await waiting
        assert pool.inquired("inquiry-1") is None

    asyncio.run(ask())
    pool.stop()
    assert [type(event) for event in posted] == [ev.PlanAsked]
