"""What the owner is shown of jobs, workers and links: messages from the scheduler's state. Pure."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from atoll.job import Precision
from atoll.plan import LinkSpec
from coordinator.federated.driver import FederatedDriver
from coordinator.membership.member import Member
from coordinator.membership.roster import Roster, Worker, flops_of
from coordinator.messages.credits import day_of
from coordinator.messages.events import UNLIMITED, Guest
from coordinator.messages.jobs import ENDED, JobState
from coordinator.pipeline.changes.recovery import loss_prices, loss_words
from coordinator.pipeline.changes.standbys import standby_words
from coordinator.pipeline.driver import PipelineDriver
from coordinator.pipeline.periods import exchange_words, steps_reported
from coordinator.pipeline.tuning.memory import measured_bytes
from coordinator.services.owners.views_federated import federated_status
from protos import atoll_control_pb2 as pb
from protos.convert import to_proto
from protos.devices import machine_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.messages.facts import JobRecord, Ledger
    from coordinator.scheduler import Scheduler
    from coordinator.services.access.register import Register
    from coordinator.shell import Shell
    from coordinator.storage.run_log import Point


DEVICE = (
    *("kind", "model", "threads", "memory_bytes", "own_memory_bytes", "processes", "instructions"),
    *("platform", "torch_version", "python_version", "atoll_version"),
)
"""Facts of a worker's device that owners see, beside the memory that it lends."""
MAX_CREDITS = 20_000  # rows of one answer, the newest days


def job_update(
    scheduler: Scheduler,
    job: str,
    now_s: float,
    *,
    commit_s: float | None = None,
    points: Iterable[Point] = (),
    with_plan: bool = True,
    with_costs: bool = True,
) -> pb.JobUpdate:
    """One job as `atoll watch` shows it; with what the loss of each stage would cost."""
    state = scheduler.jobs[job]
    update = pb.JobUpdate(
        job=job,
        name=state.spec.name,
        state=state.phase.value,
        reason=state.reason,
        step=state.step,
        steps=state.steps,
        loss=state.loss,
        eval_loss=state.eval_loss,
        plan_version=state.version,
        time_s=now_s,
        commit_s=commit_s,
        checkpoint_step=state.checkpoint.step,
        metrics=[pb.MetricPoint(step=p.step, name=p.name, value=p.value, time_s=p.time_s) for p in points],
    )
    update.priority = state.spec.rank
    waits = scheduler.waiting(job)
    if waits is not None and isfinite(waits.starts_s):
        update.starts_s = waits.starts_s
    step_s = state.median_step_s
    if step_s is not None and state.phase not in ENDED:
        update.step_s = step_s
        update.eta_s = step_s * (state.steps - state.step)
        if step_s > 0:
            update.samples_per_s = state.spec.data.batch * state.spec.training.n_micro / step_s
    driver = scheduler.driver_of(job)
    if isinstance(driver, FederatedDriver):
        update.ClearField("samples_per_s")
        update.federated.CopyFrom(federated_status(driver, job))
    held_out, training = state.spec.eval_data, state.spec.training
    if held_out is not None and isinstance(driver, PipelineDriver):
        update.held_out_rows = held_out.n_samples
        update.eval_rows = min(held_out.n_samples, training.eval_batches * held_out.batch)
        _best(update, scheduler.ledger.jobs[job])
        update.eval_metrics.extend(pb.Figure(name=n, value=v) for n, v in sorted(state.eval_metrics.items()))
    if state.plan is not None:
        if with_plan:
            update.plan.CopyFrom(to_proto(state.plan))
            update.training.CopyFrom(to_proto(state.spec.training))
        update.stages.extend(_stages(state, step_s, scheduler.roster))
        update.links.extend(carried(scheduler, state))
        if isinstance(driver, PipelineDriver):
            update.spot_checks = driver.beside.checks.words(state)
            update.exchange = exchange_words(state, scheduler.ledger.jobs[job].met, driver.effects.label)
        prices = loss_prices(state, scheduler.ledger.jobs[job], scheduler.roster) if with_costs else []
        update.loss_now = loss_words(state, prices)
        for stage, price in zip(update.stages, prices, strict=False):
            stage.replace_s, stage.replace_why, stage.copy = price.pause_s, price.why, price.copy
        for rank, standby in sorted(state.standbys.items()):
            update.stages[rank].standby = standby.worker
            update.stages[rank].standby_why = standby_words(state, standby)
    return update


def _best(update: pb.JobUpdate, record: JobRecord) -> None:
    found, kept = record.held_out.best, record.best
    if found is not None:
        update.best_eval_loss, update.best_step = found.loss, found.step
        update.best_checkpoint = kept.step if kept is not None else 0


def _stages(state: JobState, step_s: float | None, roster: Roster) -> Iterable[pb.StageStatus]:
    planned = state.predicted
    for at, place in enumerate(state.plan.places if state.plan else ()):
        report = state.run.reports.get(at)
        busy_s = report.computed_s if report else 0.0
        yield pb.StageStatus(
            stage=place.stage,
            worker=place.worker,
            busy_share=min(1.0, busy_s / step_s) if step_s else 0.0,
            forward_s=report.forward_s if report else 0.0,
            backward_s=report.backward_s if report else 0.0,
            planned_bytes=planned[at].memory_bytes if planned else 0,
            measured_bytes=measured_bytes(roster, state, at),
        )


def carried(scheduler: Scheduler, state: JobState) -> Iterable[pb.LinkRate]:
    """What each link carried in the last committed step, and under which codec and why."""
    driver = scheduler.driver_of(state.job)
    if state.plan is None or not isinstance(driver, PipelineDriver):
        return
    step_s = state.run.step_times_s[-1] if state.run.step_times_s else 0.0
    steps = steps_reported(state)
    places = state.plan.places
    specs = {ends: spec for replica in state.plan.replicas for ends, spec in replica.codecs.items()}
    for at, report in sorted(state.run.reports.items()):
        mine = places[at]
        for link in report.links:
            if not link.n_bytes:
                continue
            spec = specs.get((mine.worker, link.peer), LinkSpec(0, 0))
            yield pb.LinkRate(
                source=mine.worker,
                target=link.peer,
                bps=link.n_bytes * 8 / (steps * step_s) if step_s > 0 else 0.0,
                bytes_per_step=ceil(link.n_bytes / steps),
                codec=spec.codec,
                ratio=spec.ratio,
                reason=spec.reason,
                dense_bytes_per_step=ceil(link.dense_bytes / steps),
                measured_bps=driver.adapting.measured_bps(state.job, (mine.worker, link.peer)),
            )


def credits_of(register: Register, ledger: Ledger, since_s: float, machine: str = "") -> list[pb.Credit]:
    """Credits from a day on, the newest first. ``machine``: those of its devices alone."""
    names = {known.worker: known.name for known in register.workers.values()}
    given = [row for row in ledger.given(day_of(since_s)) if machine in ("", machine_of(row.worker))]
    return [
        pb.Credit(
            day=row.day,
            worker=row.worker,
            name=names.get(machine_of(row.worker), ""),
            owner=row.owner,
            **{
                kind: pb.WorkDone(**getattr(row, kind).shown()) for kind in ("useful", "discarded", "pending")
            },
        )
        for row in given[:MAX_CREDITS]
    ]


def worker_status(scheduler: Scheduler, name: str, now_s: float) -> pb.WorkerStatus:
    """One worker as `atoll status` shows it."""
    worker = scheduler.roster.workers[name]
    i, member = worker.introduction, worker.member
    return pb.WorkerStatus(
        worker=name,
        name=i.name,
        state=member.phase.value,
        reason=worker.reason,
        device=_device(worker),
        job=member.job,
        stage=_stage_of(scheduler, member),
        gflops=_gflops(scheduler, name),
        seen_s_ago=max(0.0, now_s - member.seen_s),
        site=i.site,
        address=next((f"{host}:{port}" for host, port in i.addresses + i.nearby), ""),
        guest=_guest(worker.guest),
        **_waits(worker),
    )


def _guest(guest: Guest) -> pb.GuestLimits | None:
    if guest == UNLIMITED:
        return None
    return pb.GuestLimits(
        compute_share=guest.compute_share,
        upload_bps=guest.upload_bps if isfinite(guest.upload_bps) else 0.0,
        download_bps=guest.download_bps if isfinite(guest.download_bps) else 0.0,
        memory_limit_bytes=guest.memory_limit_bytes,
        paused=guest.paused,
        apps_only=guest.apps_only,
    )


def _waits(worker: Worker) -> dict[str, Any]:
    """Fields of what a worker with a job waits for."""
    waits = worker.beat.waits if worker.beat is not None and worker.member.job else None
    if waits is None:
        return {}
    return {
        "waits_for": waits.peer,
        "waits_s": waits.seconds,
        "waits_what": waits.what,
        "waits_step": waits.step,
    }


def _stage_of(scheduler: Scheduler, member: Member) -> int:
    """Return the stage that a member's rank runs, -1 where its job is not cut into stages."""
    state = scheduler.jobs.get(member.job)
    if state is None or state.plan is None or state.plan.rank_of(member.worker) is None:
        return -1
    return state.plan.places[member.rank].stage


def _device(worker: Worker) -> pb.DeviceFacts:
    said = {name: getattr(worker.introduction, name) for name in DEVICE}
    return pb.DeviceFacts(memory_limit_bytes=worker.memory_limit_bytes, **said)


def _gflops(scheduler: Scheduler, name: str) -> float:
    ops = scheduler.roster.ops
    known = (ops.timings.get((name, precision.value), {}) for precision in Precision)
    return max(flops_of(timings, ops.flops) for timings in known)


def link_statuses(scheduler: Scheduler) -> list[pb.LinkStatus]:
    """Every measured link, with how its ends are joined, and the shared uplink or relay it passes."""
    roster = scheduler.roster
    sites = {w: x.introduction.site for w, x in roster.workers.items() if not x.member.gone}
    uplinks = roster.links.uplinks(sites)
    relays = roster.joined.lines(sites, roster.links.solo_bps)
    passed: dict[str, set[int]] = {}  # worker -> uplinks that it is behind
    for at, uplink in enumerate(uplinks):
        for worker in uplink.members:
            passed.setdefault(worker, set()).add(at)
    found = []
    for (source, target), link in sorted(roster.links.table.estimates.items()):
        crossed = passed.get(source, set()) ^ passed.get(target, set())
        shared = [uplinks[at].name for at in sorted(crossed)]
        shared += [relay.name for relay in relays if (source, target) in relay.pairs]
        found.append(
            pb.LinkStatus(
                source=source,
                target=target,
                bandwidth_bps=link.bandwidth_bps,
                latency_s=link.latency_s,
                shared=", ".join(shared),
                way=roster.joined.way((source, target)),
            )
        )
    return found


def health_status(shell: Shell) -> pb.CoordinatorHealth:
    """How the coordinator itself does."""
    found, dropped = shell.health.now(), shell.scheduler.effects.dropped
    return pb.CoordinatorHealth(**asdict(found), messages_dropped=sum(dropped.values()))
