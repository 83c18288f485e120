"""Messages of the coordinator as facts and tables of the page, under the messages' own field names. Pure."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from coordinator.dashboard.model import Row, View, number
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos import coding

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from coordinator.dashboard.curves import Seen

MAX_WORKERS = 5_000
MAX_LINKS = 2_000  # the slowest
MAX_JOBS = 200  # the newest
SHOWN_WAIT_S, SHOWN_SILENCE_S = 2.0, 3.0  # what is shorter is part of every step, or of every beat
RECENT_DAYS = 30
GB, MEMORY_STEP = 1 << 30, 16 << 20
_GIVEN = (
    "steps",
    "samples",
    "compute_s",
    "bytes_in",
    "bytes_out",
    "pending_steps",
    "discarded_steps",
    "energy_j",
)
_OF_JOBS = ("job", "name", "state", "reason", "step", "steps", "checkpoint_step", "plan_version")
_MEASURED = ("loss", "eval_loss", "best_eval_loss", "step_s", "samples_per_s", "eta_s", "commit_s")


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON-ready values under its own field names; an unset optional is None."""
    return coding.plain(message, _value)


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return number(value) if isinstance(value, float) else value


def _optional(message: Message, name: str) -> Any:
    return _value(getattr(message, name)) if message.HasField(name) else None


# ---------------------------------------------------------------- the fleet


def fleet_view(status: pb.StatusReply) -> View:
    """Workers, jobs and the slowest links of a fleet."""
    joined = [link for link in status.links if link.bandwidth_bps]
    slowest = sorted(joined, key=lambda link: link.bandwidth_bps)[:MAX_LINKS]
    return View(
        facts={
            "version": status.version,
            "uptime_s": int(status.uptime_s),
            "workers": len(status.workers),
            "links": len(status.links),
            "jobs": len(status.jobs),
            **_health(status.health),
        },
        tables={
            "workers": {worker.worker: worker_row(worker) for worker in status.workers[:MAX_WORKERS]},
            "jobs": {job.job: job_row(job) for job in status.jobs[-MAX_JOBS:]},
            "links": {f"{link.source}>{link.target}": plain(link) for link in slowest},
        },
    )


def _health(health: pb.CoordinatorHealth) -> dict[str, float]:
    """The coordinator's own figures, as coarse as a reader looks at them."""
    return {
        "lag_s": float(f"{health.lag_s:.1g}"),
        "append_s": float(f"{health.append_s:.1g}"),
        "disk_free_bytes": round(health.disk_free_bytes / GB, 1) * GB,
        "memory_bytes": round(health.memory_bytes / MEMORY_STEP) * MEMORY_STEP,
        "messages_dropped": health.messages_dropped,
    }


def worker_row(worker: pb.WorkerStatus) -> Row:
    """One worker; of what changes with every beat only what a reader would look at."""
    device, guest = worker.device, worker.guest
    waits_s = worker.waits_s if worker.waits_s >= SHOWN_WAIT_S else 0.0
    silent_s = worker.seen_s_ago if worker.seen_s_ago >= SHOWN_SILENCE_S else 0.0
    return {
        "name": worker.name,
        "state": worker.state,
        "reason": worker.reason,
        "kind": device.kind,
        "model": device.model,
        "threads": device.threads,
        "memory_bytes": device.memory_bytes,
        "memory_limit_bytes": device.memory_limit_bytes,
        "torch_version": device.torch_version,
        "python_version": device.python_version,
        "atoll_version": device.atoll_version,
        "platform": device.platform,
        "job": worker.job,
        "stage": worker.stage,
        "gflops": round(worker.gflops, 1) if isfinite(worker.gflops) else 0.0,
        "site": worker.site,
        "address": worker.address,
        "silent_s": int(silent_s),
        "waits_s": int(waits_s),
        "waits_for": worker.waits_for if waits_s else "",
        "waits_what": worker.waits_what if waits_s else "",
        "waits_step": worker.waits_step if waits_s else 0,
        "guest": plain(guest) if worker.HasField("guest") else None,
    }


def job_row(job: pb.JobUpdate) -> Row:
    """One job in the list of all."""
    return {
        **{name: getattr(job, name) for name in _OF_JOBS},
        **{name: _optional(job, name) for name in _MEASURED},
        "federated": job.HasField("federated"),
        "workers": len(job.federated.clients) if job.HasField("federated") else len(job.stages),
    }


# ---------------------------------------------------------------- a job


class JobSeen:
    """What is known of one job: updates leave out what has not changed."""

    def __init__(self) -> None:
        self._plan: Mapping[str, Any] | None = None
        self._settings: list[str] = []
        self._prices: dict[tuple[int, str], Row] = {}
        self._update = pb.JobUpdate()

    @property
    def state(self) -> str:
        """The job's newest state, "" before the first update."""
        return self._update.state

    def take(self, update: pb.JobUpdate, settings: Iterable[str] = ()) -> None:
        """Take an update of the job. ``settings``: its training's, where the update holds that."""
        if update.HasField("plan"):
            self._plan = plan_of(update.plan)
        self._settings = list(settings) or self._settings
        priced = {
            (rank, stage.worker): _price(stage)
            for rank, stage in enumerate(update.stages)
            if stage.HasField("replace_s")
        }
        self._prices = priced or self._prices
        if update.loss_now == "" and update.stages and not priced:
            update.loss_now = self._update.loss_now  # said now and then
        self._update = update

    def view(
        self,
        workers: Mapping[str, Row],
        curves: Mapping[str, Seen],
        checkpoints: Iterable[pb.Checkpoint],
    ) -> View:
        """The job with the names of its workers, whose rows are those of the fleet's view."""
        update = self._update
        stages = {str(rank): self._stage(rank, stage) for rank, stage in enumerate(update.stages)}
        clients = {client.worker: plain(client) for client in update.federated.clients[:MAX_WORKERS]}
        here = {row["worker"] for row in stages.values()} | {row["standby"] for row in stages.values()}
        here |= (
            clients.keys() | {link.source for link in update.links} | {link.target for link in update.links}
        )
        here |= set(self._named_in_plan())
        return View(
            facts={
                **job_row(update),
                "best_step": update.best_step,
                "best_checkpoint": update.best_checkpoint,
                "eval_rows": update.eval_rows,
                "held_out_rows": update.held_out_rows,
                "eval_metrics": [plain(figure) for figure in update.eval_metrics],
                "spot_checks": update.spot_checks,
                "loss_now": update.loss_now,
                "exchange": update.exchange,
                "plan": self._plan,
                "settings": self._settings,
                "federation": _federation(update) if update.HasField("federated") else None,
            },
            tables={
                "stages": stages,
                "links": {f"{link.source}>{link.target}": plain(link) for link in update.links[:MAX_LINKS]},
                "clients": clients,
                "checkpoints": {str(kept.step): plain(kept) for kept in checkpoints},
                "workers": {worker: _named(workers[worker]) for worker in here if worker in workers},
            },
            curves=curves,
        )

    def _named_in_plan(self) -> Iterable[str]:
        plan = self._plan or {}
        yield from (out["worker"] for out in plan.get("left_out", ()))
        yield (plan.get("prediction") or {}).get("single_machine", "")

    def _stage(self, rank: int, stage: pb.StageStatus) -> Row:
        unknown = {"replace_s": None, "replace_why": "", "copy": ""}
        return {**plain(stage), **self._prices.get((rank, stage.worker), unknown)}


def _price(stage: pb.StageStatus) -> Row:
    return {"replace_s": number(stage.replace_s), "replace_why": stage.replace_why, "copy": stage.copy}


def _named(row: Row) -> Row:
    return {name: row[name] for name in ("name", "state", "kind", "site", "reason", "waits_s", "waits_for")}


def _federation(update: pb.JobUpdate) -> dict[str, Any]:
    found = plain(update.federated)
    del found["clients"]
    return found


def plan_of(plan: job_pb.Plan) -> dict[str, Any]:
    """A plan as the page draws it: replicas of stages, in whose order the ranks are numbered."""
    found = plain(plan)
    alone = {"start": 0, "stop": plan.n_micro, "stages": found.pop("stages"), "links": found.pop("links")}
    found["replicas"] = found["replicas"] or [alone]
    if found["exchange"] is not None:  # tables of rates between all pairs, which nobody reads
        found["exchange"] = {**found["exchange"], "rates": [], "pair_rates": [], "sites": []}
    return found


# ---------------------------------------------------------------- contributions


def contributions_view(rows: Iterable[pb.Credit]) -> View:
    """Sums of credits by worker and by day, of rows by both and owner. ``recent``: seconds on each of the
    newest days. Work that is not stored yet counts, with its steps beside; discarded work does not."""
    listed = list(rows)
    days = sorted({row.day for row in listed})
    recent = days[-RECENT_DAYS:]
    at = {day: number for number, day in enumerate(recent)}
    workers: dict[str, dict[str, Any]] = {}
    by_day: dict[str, dict[str, float]] = {day: dict.fromkeys(_GIVEN, 0.0) for day in days}
    on: dict[str, set[str]] = defaultdict(set)  # days of a worker
    for row in listed:
        known = workers.get(row.worker)
        if known is None:
            if len(workers) >= MAX_WORKERS:
                continue
            known = {"name": row.name, **dict.fromkeys(_GIVEN, 0), "recent": [0.0] * len(recent)}
            workers[row.worker] = known
        given = _given(row)
        for name, value in given.items():
            known[name] += value
            by_day[row.day][name] += value
        on[row.worker].add(row.day)
        if row.day in at:
            known["recent"][at[row.day]] += given["compute_s"]
    for worker, known in workers.items():
        known |= {"days": len(on[worker]), "since": min(on[worker])}
    there = Counter(day for found in on.values() for day in found)
    totals = {name: sum(day[name] for day in by_day.values()) for name in _GIVEN}
    facts = {"days": len(days), "since": days[0] if days else "", "recent": recent, "totals": totals}
    facts["measured"] = sum(known["energy_j"] > 0 for known in workers.values())
    given_on = {day: row | {"workers": there[day]} for day, row in by_day.items()}
    return View(facts, {"given": workers, "days": given_on})


def _given(row: pb.Credit) -> dict[str, float]:
    done = (row.useful, row.pending)
    return {
        "steps": sum(work.steps for work in done),
        "samples": sum(work.samples for work in done),
        "compute_s": sum(work.computed_ms for work in done) / 1e3,
        "bytes_in": sum(work.received_bytes for work in done),
        "bytes_out": sum(work.sent_bytes for work in done),
        "pending_steps": row.pending.steps,
        "discarded_steps": row.discarded.steps,
        "energy_j": sum(work.energy_mj for work in done) / 1e3,
    }


# ---------------------------------------------------------------- events


def event_row(line: pb.LogLine, worker: str = "") -> Row:
    """One line of the log; fields that are no JSON object stand as one text. ``worker``: its worker."""
    try:
        fields = json.loads(line.fields_json or "{}")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {"text": line.fields_json}
    words = {str(key): _word(value) for key, value in fields.items()}
    return {
        "time_s": number(line.time_s),
        "level": line.level,
        "event": line.event,
        "source": line.source,
        "job": line.job,
        "worker": worker or words.get("worker", ""),
        "fields": words,
    }


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
