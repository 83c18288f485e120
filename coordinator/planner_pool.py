"""Threads for what would hold the scheduler's loop: planning, and reading a submitted job from the disk.

An instruction asks, an event answers. An owner who wants a plan and no job (``atoll plan``) waits for it in
``inquire``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from atoll.errors import AtollError, PlanError, StorageError
from atoll.job import JobSpec
from atoll.plan import Plan
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import JobRecord
from coordinator.planning.chosen import chosen_plan, exact_step_s, grown_fleet, shape
from coordinator.planning.codecs.new_codecs import respec, step_with
from coordinator.planning.planner import PlanRequest
from coordinator.storage.blob_store import Gone
from coordinator.storage.graph_store import Graphs, GraphStore

log = structlog.get_logger()

Judged = do.ChooseLinks | do.JudgeFleet
"""Questions about a running job."""


@dataclass(slots=True)
class PlannerPool:
    """Two threads, and who waits for them; every method belongs to the event loop's thread."""

    graphs: GraphStore
    post: Callable[[ev.Event], None]
    _inquiries: dict[str, tuple[JobSpec, asyncio.Future[Plan]]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "atoll-plan"))

    def stop(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def inquire(self, spec: JobSpec, within_s: float) -> Plan:
        """Return a plan for the fleet as it is; nothing is started. Raises PlanError, TimeoutError."""
        graphs = await asyncio.to_thread(self.graphs.graphs, spec.dag_hash, spec.eval_dag_hash)
        name = f"inquiry-{next(self._numbers)}"
        answer: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self._inquiries[name] = (spec, answer)
        try:
            self.post(ev.PlanAsked(name, spec, graphs.flops))
            return await asyncio.wait_for(answer, within_s)
        finally:
            self._inquiries.pop(name, None)

    def inquired(self, name: str) -> JobSpec | None:
        """Return the job of an inquiry that waits for its plan."""
        return self._inquiries[name][0] if name in self._inquiries else None

    async def make_plan(self, request: do.MakePlan) -> None:
        """Plan a job, or answer an inquiry."""

        def work() -> Plan:
            plan = chosen_plan(self._plan_request(request, request.beyond))
            if request.job not in self._inquiries:
                self.graphs.programs(plan)
            return plan

        asked = self._inquiries.pop(request.job, None)
        try:
            plan = await self._in_thread(work)
        except Exception as error:
            if not isinstance(error, AtollError):
                log.exception("planner.crashed", job=request.job)
            if asked is not None:
                asked[1].set_exception(error)
                return
            hopeless = not isinstance(error, PlanError | StorageError)
            self.post(ev.PlanFailed(request.job, request.attempt, str(error), hopeless))
            return
        if asked is not None:
            asked[1].set_result(plan)
        else:
            self.post(ev.PlanMade(request.job, request.attempt, plan))

    async def judge(self, request: Judged) -> None:
        """Think about a running job, and post what came of it."""
        work, failed = _JUDGES[type(request)]
        try:
            found = await self._in_thread(lambda: work(self, request))
        except Exception as error:
            if not isinstance(error, AtollError):
                log.exception("planner.crashed", job=request.job)
            found = failed(request.job, request.attempt, str(error))
        self.post(found)

    async def read_job(self, request: do.ReadJob, record: JobRecord) -> None:
        """Check a job's graphs, and find the newest of its checkpoints that is whole."""
        job, start = request.job, record.start

        def read() -> tuple[Graphs, ev.Needs, list[tuple[int, str]]]:
            graphs, found = self.graphs.check(request.spec), []
            needs = graphs.needs(request.spec.training)
            for checkpoint in (*reversed(record.checkpoints), start):
                wrong = self.graphs.torn(request.spec, checkpoint.tensors, hashes=request.hashes)
                if not wrong:
                    break
                if checkpoint is start:
                    raise Gone(f"{wrong}, and {job} has no other checkpoint; submit it again")
                found.append((checkpoint.step, wrong))
            return graphs, needs, found

        try:
            graphs, needs, found = await self._in_thread(read)
        except (AtollError, OSError) as error:
            # A store that does not answer, or has no room for what it fetches, may do so later.
            hopeless = isinstance(error, Gone) or not isinstance(error, StorageError | OSError)
            self.post(ev.JobUnreadable(job, str(error), hopeless))
        else:
            for step, wrong in found:
                self.post(ev.TornFound(job, step, wrong))
            self.post(ev.JobRead(job, graphs.flops, needs))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _plan_request(self, asked: do.MakePlan, beyond: int = 0) -> PlanRequest:
        spec = asked.spec
        graphs = self.graphs.graphs(spec.dag_hash, spec.eval_dag_hash)
        return PlanRequest(
            asked.job,
            asked.version,
            graphs.train,
            graphs.evaluation,
            spec.training,
            asked.fleet,
            spec.partitioner,
            spec.schedule,
            dag_hash=spec.dag_hash,
            eval_dag_hash=spec.eval_dag_hash,
            beyond=beyond,
            standbys=spec.standbys,
            pinned=spec.data_of,
        )

    # ------------------------------------------------------------ in a thread

    def _choose_links(self, request: do.ChooseLinks) -> ev.LinksChosen:
        plan = request.plan
        graphs = self.graphs.graphs(plan.dag_hash, plan.eval_dag_hash)
        links = respec(plan, graphs.train, request.training, request.fleet)
        return ev.LinksChosen(request.job, request.attempt, links)

    def _judge_fleet(self, request: do.JudgeFleet) -> ev.FleetJudged:
        plan, spec = request.plan, request.spec
        dag = self.graphs.graphs(plan.dag_hash, plan.eval_dag_hash).train
        workers = [place.worker for place in plan.places]

        def step_s(these: list[str]) -> float:
            moved = plan.moved(plan.version, these)
            return step_with(moved, dag, spec.training, request.fleet, moved.links)

        swapped_s = {
            (rank, worker): step_s([*workers[:rank], worker, *workers[rank + 1 :]])
            for rank, worker in request.swaps
            if worker not in workers
        }
        found = ev.FleetJudged(request.job, request.attempt, step_s(workers) if swapped_s else 0.0, swapped_s)
        if not request.own:
            return found
        make = do.MakePlan(request.job, request.attempt, plan.version + 1, spec, request.fleet)
        own, grown = grown_fleet(self._plan_request(make), request.own)
        return replace(
            found,
            own_s=exact_step_s(own),
            grown_s=exact_step_s(grown),
            workers=tuple(place.worker for place in grown.places),
            shape=shape(grown),
        )


_JUDGES: dict[
    type[Judged],
    tuple[Callable[[PlannerPool, Any], ev.Event], type[ev.LinksFailed | ev.FleetFailed]],
] = {
    do.ChooseLinks: (PlannerPool._choose_links, ev.LinksFailed),
    do.JudgeFleet: (PlannerPool._judge_fleet, ev.FleetFailed),
}
