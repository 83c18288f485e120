"""Output of the `atoll` command: plans, fleets and running jobs as rich tables and plain lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.plan import LinkSpec, Plan, Prediction
from atoll.worker_names import distinct
from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import (
    DIM,
    add_row,
    in_bits,
    in_bytes,
    in_seconds,
    reason_of,
    share_bar,
    sparkline,
)
from coordinator.cli.views.render_federated import federated_parts, federated_words
from protos import atoll_control_pb2 as pb

Names = Mapping[str, str]  # worker id -> name for people
SCARCE_BYTES, SLOW_S = 2 << 30, 1.0  # figures of the coordinator that a reader should hear of
SHOWN_WAIT_S = 2.0  # shorter waits are part of every step


# ---------------------------------------------------------------- plans


def plan_view(plan: Plan, names: Names) -> RenderableType:
    """Stages, links, prediction and reasons of a plan."""
    several = f"{len(plan.replicas)} replicas, " if len(plan.replicas) > 1 else ""
    shape = f"{several}{len(plan.places)} stages, {plan.n_micro} micro-batches, {plan.schedule}"
    parts: list[RenderableType] = [Text(f"{plan.partitioner} plan: {shape}")]
    prediction = plan.prediction
    parts.append(_stages_table(plan, prediction, names))
    if prediction is not None:
        parts += [_links_table(plan, prediction, names), _verdict(prediction, names)]
    parts += [
        Text(f"{_name(names, source)} > {_name(names, target)}: {spec.reason}", style=DIM)
        for replica in plan.replicas
        for (source, target), spec in replica.codecs.items()
        if spec.reason
    ]
    for worker, why in plan.left_out:
        parts.append(Text(f"left out: {_name(names, worker)}: {why}", style=DIM))
    return Group(*parts)


def memory_view(plan: Plan, names: Names) -> RenderableType:
    """Memory of each stage by what takes it, and the sum, which its device's limit is compared with."""
    stages = plan.prediction.stages if plan.prediction is not None else ()
    terms = list(dict.fromkeys(name for stage in stages for name, _ in stage.memory_terms))
    scaled = any(stage.memory_scale != 1.0 for stage in stages)
    table = _table("stage", "device", *terms, *(("as measured",) if scaled else ()), "in all", "limit")
    for place, stage in zip(plan.places, stages, strict=False):
        sizes = dict(stage.memory_terms)
        row = [str(place.stage), _name(names, place.worker)]
        row += [in_bytes(sizes[name]) if sizes.get(name) else "-" for name in terms]
        row += [f"x {stage.memory_scale:.2f}"] if scaled else []
        add_row(table, *row, in_bytes(stage.memory_bytes), in_bytes(stage.memory_limit_bytes))
    return table


def _stages_table(plan: Plan, prediction: Prediction | None, names: Names) -> Table:
    several = len(plan.replicas) > 1
    more = ("replica", "micro-batches") if several else ()
    table = _table(*more, "stage", "device", "ops", "compute a step", "busy", "memory", "of its limit")
    for rank, place in enumerate(plan.places):
        replica = plan.replicas[place.replica]
        stage, (first, stop) = replica.stages[place.stage], replica.micros
        row = [str(place.replica), f"{first}-{stop - 1}"] if several else []
        ops = ", ".join(f"{piece.start}-{piece.stop - 1}" for piece in stage.pieces)
        row += [str(place.stage), _name(names, stage.worker), ops]
        if prediction is not None and rank < len(prediction.stages):
            found = prediction.stages[rank]
            share = found.memory_bytes / found.memory_limit_bytes if found.memory_limit_bytes else 0.0
            row += [in_seconds(found.compute_s), share_bar(found.busy_share)]
            row += [in_bytes(found.memory_bytes), f"{share:.0%} of {in_bytes(found.memory_limit_bytes)}"]
        add_row(table, *row)
    return table


def _links_table(plan: Plan, prediction: Prediction, names: Names) -> Table:
    """Links with what they carry; with codec and ratio where compression was asked for."""
    from coordinator.planning.codecs.ratios import label  # numpy, which most commands do without

    specs = {ends: spec for replica in plan.replicas for ends, spec in replica.codecs.items()}
    chosen = any(spec.reason for spec in specs.values())
    more = ("codec", "gradients", "of dense") if chosen else ()
    table = _table("link", "bytes a step", "busy a step", "busy", *more)
    for link in prediction.links:
        share = link.busy_s / prediction.step_s if prediction.step_s > 0 else 0.0
        pair = f"{_name(names, link.source)} > {_name(names, link.target)}"
        row = [pair, in_bytes(link.bytes_per_step), in_seconds(link.busy_s), share_bar(share)]
        if chosen:
            spec = specs.get((link.source, link.target), LinkSpec(0, 0))
            kept = link.bytes_per_step / link.dense_bytes_per_step if link.dense_bytes_per_step else 1.0
            row += [label(spec), spec.mask.value, f"{kept:.1%}"]
        add_row(table, *row)
    return table


def _verdict(prediction: Prediction, names: Names) -> Table:
    table = FactTable.grid(padding=(0, 2))
    ratio = prediction.step_s / prediction.lower_bound_s if prediction.lower_bound_s > 0 else float("nan")
    add_row(table, "predicted step", f"{in_seconds(prediction.step_s)}")
    add_row(table, "lower bound", f"{in_seconds(prediction.lower_bound_s)} (the step is {ratio:.2f}x of it)")
    add_row(table, "bottleneck", f"{prediction.bottleneck}: {prediction.reason}")
    if prediction.single_machine_s is not None:
        single = _name(names, prediction.single_machine)
        times = prediction.step_s / prediction.single_machine_s
        alone = (
            f"{in_seconds(prediction.single_machine_s)} on {single}, memory aside ({times:.2f}x the speed)"
        )
        add_row(table, "one machine", alone)
    for note in prediction.notes:
        add_row(table, "note", note)
    return table


# ---------------------------------------------------------------- fleets and jobs


def status_view(status: pb.StatusReply) -> RenderableType:
    """The coordinator at a glance."""
    names = worker_names(status.workers)
    parts: list[RenderableType] = [
        Text(f"coordinator atoll {status.version}, up {in_seconds(status.uptime_s)}{_health(status.health)}"),
        _workers_table(status.workers, names),
        jobs_table(status.jobs),
        *(Text(f"{job.job}: {job.loss_now}", style=DIM) for job in status.jobs if job.loss_now),
        *(cost for job in status.jobs for cost in _costs(job.stages, f"{job.job}: ")),
    ]
    for job in status.jobs:
        parts += _memory(job.stages, job.job)
        parts += _standbys(job.stages, names)
        if job.exchange:
            parts.append(Text(f"{job.job}: {job.exchange}", style=DIM))
    if status.links:
        parts.append(_rates_table(status.links, names))
    return Group(*parts)


def _health(health: pb.CoordinatorHealth) -> str:
    """What of the coordinator's own figures is unusual."""
    found = []
    if 0 < health.disk_free_bytes < SCARCE_BYTES:
        found.append(f"only {in_bytes(health.disk_free_bytes)} of its disk are free")
    if health.append_s > SLOW_S:
        found.append(f"its journal took {in_seconds(health.append_s)} for one write")
    if health.lag_s > SLOW_S:
        found.append(f"it came {in_seconds(health.lag_s)} late to its work")
    return "".join(f"; {what}" for what in found)


def worker_names(workers: Iterable[pb.WorkerStatus]) -> dict[str, str]:
    """Worker id -> the name its owner gave it, with the beginning of the id where two have one name."""
    return distinct({status.worker: status.name for status in workers})


def _workers_table(workers: Sequence[pb.WorkerStatus], names: Names) -> RenderableType:
    if not workers:
        return Text("no workers; start some with `atoll-worker join HOST:PORT --token T`", style=DIM)
    table = _table("worker", "name", "state", "device", "speed", "memory", "job", "seen", "why")
    for worker in workers:
        device = f"{worker.device.kind} x{worker.device.threads}" if worker.device.kind else "?"
        device += f" in {worker.device.processes} processes" if worker.device.processes > 1 else ""
        at = f"{worker.job} stage {worker.stage}" if worker.stage >= 0 and worker.job else worker.job
        add_row(
            table,
            worker.worker,
            worker.name,
            worker.state,
            device,
            f"{worker.gflops:.0f} GFLOP/s" if worker.gflops else "",
            _lent(worker.device),
            at,
            f"{worker.seen_s_ago:.1f} s ago",
            _why(worker, names),
        )
    return table


def _lent(device: pb.DeviceFacts) -> str:
    """Memory that a stage may have, of how much that the worker may take in all."""
    stage, whole = device.memory_limit_bytes, device.memory_limit_bytes + device.own_memory_bytes
    return f"{in_bytes(stage)} of {in_bytes(whole)}" if device.own_memory_bytes else in_bytes(stage)


def _why(worker: pb.WorkerStatus, names: Names) -> str:
    """Why it is in its state, and what it has been waiting for, if that is more than a moment."""
    if worker.waits_s < SHOWN_WAIT_S:
        return worker.reason
    whom = f" from {_name(names, worker.waits_for)}" if worker.waits_for else ""
    waits = f"waits {in_seconds(worker.waits_s)} for {worker.waits_what}{whom}, step {worker.waits_step + 1}"
    return f"{worker.reason}; {waits}"


def jobs_table(jobs: Sequence[pb.JobUpdate]) -> RenderableType:
    """Return a table with a row per job."""
    if not jobs:
        return Text("no jobs; submit one with `atoll submit JOBFILE`", style=DIM)
    table = _table("job", "name", "state", "step", "loss", "held-out", "step time", "ETA", "why")
    for job in jobs:
        add_row(
            table,
            job.job,
            job.name,
            job.state,
            f"{job.step}/{job.steps}",
            _optional(job, "loss", "{:.4f}"),
            held_out_words(job).removeprefix("held-out "),
            in_seconds(job.step_s) if job.HasField("step_s") else "",
            in_seconds(job.eta_s) if job.HasField("eta_s") else "",
            reason_of(job),
        )
    return table


def _rates_table(links: Sequence[pb.LinkStatus], names: Names) -> Table:
    table = _table("link", "rate", "one way", "joined", "shares")
    for link in links:
        pair = f"{_name(names, link.source)} > {_name(names, link.target)}"
        rate = in_bits(link.bandwidth_bps) if link.bandwidth_bps else "?"
        add_row(table, pair, rate, in_seconds(link.latency_s), link.way or "-", link.shared)
    return table


# ---------------------------------------------------------------- a running job


def watch_view(update: pb.JobUpdate, losses: Sequence[float], names: Names) -> RenderableType:
    """A running job: progress, loss, stages and links."""
    done = update.step / update.steps if update.steps else 0.0
    head = Table.grid(padding=(0, 2))
    add_row(head, "job", f"{update.job} {update.name}", Text(update.state, style="bold"), reason_of(update))
    federated = update.HasField("federated")
    what = "round" if federated else "step"
    add_row(head, what, f"{update.step}/{update.steps}", share_bar(done, 24), pace(update))
    if federated:
        return Group(head, *federated_parts(update, losses, names))
    loss = _optional(update, "loss", "{:.4f}")
    add_row(head, "loss", loss, sparkline(losses), held_out_words(update))
    parts: list[RenderableType] = [head]
    if update.stages:
        parts.append(_busy_table(update.stages, names))
        if update.loss_now:
            parts.append(Text(update.loss_now))
        parts += _costs(update.stages)
        parts += _standbys(update.stages, names)
    if update.spot_checks:
        parts.append(Text(update.spot_checks, style=DIM))
    if update.exchange:
        parts.append(Text(update.exchange, style=DIM))
    if update.links:
        parts += [_carried_table(update.links, names), *_reasons(update.links, names)]
    return Group(*parts)


def held_out_words(update: pb.JobUpdate) -> str:
    """Held-out loss and metrics, the best loss and its step, and of how many rows where those are not all."""
    if not update.HasField("eval_loss"):
        return ""
    words = [f"held-out {update.eval_loss:.4f}", *(f"{f.name} {f.value:.4g}" for f in update.eval_metrics)]
    if update.HasField("best_eval_loss") and update.best_eval_loss != update.eval_loss:
        words.append(f"(best {update.best_eval_loss:.4f} at step {update.best_step})")
    if update.eval_rows < update.held_out_rows:
        words.append(f"({update.eval_rows} of {update.held_out_rows} rows)")
    return " ".join(words)


def watch_line(update: pb.JobUpdate, told: str = "") -> str:
    """A running job in one line, for logs and pipes; a reason already ``told`` is not repeated."""
    what = "round" if update.HasField("federated") else "step"
    words = [f"{update.job} {update.state}", f"{what} {update.step}/{update.steps}"]
    words += [_optional(update, "loss", "loss {:.4f}"), held_out_words(update)]
    words += [pace(update)]
    if update.HasField("federated"):
        words += federated_words(update)
    if update.stages:
        shares = " ".join(f"{stage.busy_share:.0%}" for stage in update.stages)
        words.append(f"busy {shares}")
    if update.links:
        words.append("links " + " ".join(f"{link.bps / 1e6:.1f}" for link in update.links) + " Mbit/s")
        coded = [codec_label(link) for link in update.links]
        if any(label != "none" for label in coded):
            words.append("codecs " + " ".join(coded))
    words.append(update.loss_now)
    if update.reason != told:
        words.append(update.reason)
    return ", ".join(word for word in words if word)


def codec_label(link: pb.LinkRate) -> str:
    """Return the label of the codec of a link's tensors: topk:31.2, bf16, none."""
    return f"{link.codec}:{link.ratio:.3g}" if link.ratio > 1.0 else link.codec


def _carried_table(links: Sequence[pb.LinkRate], names: Names) -> Table:
    table = _table("link", "used", "can carry", "a step", "of dense", "codec")
    for link in links:
        dense = link.dense_bytes_per_step
        add_row(
            table,
            f"{_name(names, link.source)} > {_name(names, link.target)}",
            in_bits(link.bps),
            in_bits(link.measured_bps) if link.measured_bps else "?",
            in_bytes(link.bytes_per_step),
            f"{link.bytes_per_step / dense:.1%} of {in_bytes(dense)}" if dense else "",
            codec_label(link),
        )
    return table


def _reasons(links: Sequence[pb.LinkRate], names: Names) -> list[Text]:
    return [
        Text(f"{_name(names, link.source)} > {_name(names, link.target)}: {link.reason}", style=DIM)
        for link in links
        if link.reason
    ]


def pace(update: pb.JobUpdate) -> str:
    """Return samples a second, seconds a step and the time that is left."""
    words = [_optional(update, "samples_per_s", "{:.1f} samples/s")]
    if update.HasField("step_s"):
        what = "round" if update.HasField("federated") else "step"
        words.append(f"{in_seconds(update.step_s)} a {what}")
    if update.HasField("eta_s"):
        words.append(f"ETA {in_seconds(update.eta_s)}")
    return ", ".join(word for word in words if word)


def _costs(stages: Sequence[pb.StageStatus], job: str = "") -> list[Text]:
    return [
        Text(
            f"{job}losing stage {stage.stage} now costs {in_seconds(stage.replace_s)}: {stage.replace_why}"
            + (f"; its tensors are {stage.copy}" if stage.copy else ""),
            style=DIM,
        )
        for stage in stages
        if stage.HasField("replace_s")
    ]


def _memory(stages: Sequence[pb.StageStatus], job: str) -> list[Text]:
    """What running stages were planned to take of memory, and the most that each has held."""
    held = [
        f"stage {s.stage} {in_bytes(s.planned_bytes)} planned, {in_bytes(s.measured_bytes)} measured"
        for s in stages
        if s.planned_bytes and s.measured_bytes
    ]
    return [Text(f"{job}: memory of {'; '.join(held)}", style=DIM)] if held else []


def _standbys(stages: Sequence[pb.StageStatus], names: Names) -> list[Text]:
    return [
        Text(
            f"{_name(names, stage.standby)} stands by for stage {stage.stage}: {stage.standby_why}", style=DIM
        )
        for stage in stages
        if stage.standby
    ]


def _busy_table(stages: Sequence[pb.StageStatus], names: Names) -> Table:
    table = _table("stage", "device", "busy", "forward", "backward", "memory planned", "measured")
    for stage in stages:
        add_row(
            table,
            str(stage.stage),
            _name(names, stage.worker),
            share_bar(stage.busy_share),
            in_seconds(stage.forward_s),
            in_seconds(stage.backward_s),
            in_bytes(stage.planned_bytes) if stage.planned_bytes else "?",
            in_bytes(stage.measured_bytes) if stage.measured_bytes else "?",
        )
    return table


# ---------------------------------------------------------------- helpers


def _table(*columns: str) -> Table:
    return FactTable(*columns, header_style=DIM)


def _name(names: Names, worker: str) -> str:
    return names.get(worker) or worker


def _optional(message: pb.JobUpdate, field: str, form: str) -> str:
    # Typed as a plain name since presence is asked by name in protobuf.
    return form.format(getattr(message, field)) if message.HasField(field) else ""  # type: ignore[arg-type]
