"""What everybody may see: counts, curves and totals; no worker's name, address, reason or log. Pure.

Each field is named here: what the coordinator learns to report later is not public by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from coordinator.dashboard.model import View, number
from coordinator.dashboard.rows import MAX_JOBS, contributions_view

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protos import atoll_control_pb2 as pb

CURVES = ("loss", "eval_loss", "clients_loss")
GONE = frozenset({"dead", "left"})
_SHOWN = ("state", "step", "steps")
_MEASURED = ("loss", "eval_loss", "best_eval_loss", "step_s", "samples_per_s", "eta_s")


def public_view(status: pb.StatusReply, given: Iterable[pb.Credit]) -> View:
    """Counts by place, unnamed and the largest first, jobs, and what all have given together."""
    places: dict[str, Counter[str]] = defaultdict(Counter)
    memory_bytes, gflops = 0, 0.0
    for worker in status.workers:
        if worker.state in GONE:
            continue
        places[worker.site]["at work" if worker.job else "idle"] += 1
        memory_bytes += worker.device.memory_limit_bytes or worker.device.memory_bytes
        gflops += worker.gflops
    counts = sorted((dict(sorted(found.items())) for found in places.values()), key=_size, reverse=True)
    summed = contributions_view(given)
    days = {day: {"compute_s": row["compute_s"]} for day, row in summed.tables["days"].items()}
    return View(
        facts={
            "workers": sum(map(_size, counts)),
            "places": counts,
            "memory_bytes": memory_bytes,
            "gflops": number(round(gflops, 1)),
            "totals": {**summed.facts["totals"], "workers": len(summed.tables["given"])},
            "since": summed.facts["since"],
            "measured": summed.facts["measured"],
        },
        tables={"jobs": {job.job: public_job(job) for job in status.jobs[-MAX_JOBS:]}, "days": days},
    )


def public_job(job: pb.JobUpdate) -> dict[str, Any]:
    """One job by its name: state, progress and losses."""
    shown: dict[str, Any] = {name: getattr(job, name) for name in _SHOWN}
    for name in _MEASURED:
        shown[name] = number(getattr(job, name)) if job.HasField(name) else None  # type: ignore[arg-type]
    federated = job.HasField("federated")
    workers = len(job.federated.clients) if federated else len(job.stages)
    return {**shown, "federated": federated, "workers": workers}


def public_run(view: View) -> View:
    """The curves of a job's view, and nothing else of it."""
    return View(curves={name: view.curves[name] for name in CURVES if name in view.curves})


def _size(place: dict[str, int]) -> int:
    return sum(place.values())
