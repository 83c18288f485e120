"""What the `atoll` command shows: plans, fleets and running jobs as rich tables and plain lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.plan import LinkSpec, Plan, Prediction
from protos import atoll_control_pb2 as pb

Names = Mapping[str, str]  # worker id -> name for people
_BARS = "▁▂▃▄▅▆▇█"
GOOD, BAD, DIM = "green", "red", "dim"


# ---------------------------------------------------------------- numbers and words


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON-ready values under its own field names; an unset optional is None."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            items = list(value)
            found[field.name] = [plain(item) if isinstance(item, Message) else item for item in items]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = plain(value) if isinstance(value, Message) else value
    return found


def in_bytes(n_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def in_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 75 -> "1m15s", 7300 -> "2h01m"."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def in_bits(bits_per_s: float) -> str:
    """Bits a second in the unit that links are sold in."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.2f} Gbit/s"
    return f"{bits_per_s / 1e6:.1f} Mbit/s"


def share_bar(share: float, width: int = 10) -> str:
    """0.5 -> "█████·····  50 %"."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "·" * (width - filled) + f" {share:4.0%}"


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The last ``width`` values as a row of bars."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


# ---------------------------------------------------------------- plans


def plan_view(plan: Plan, names: Names) -> RenderableType:
    """Stages, links, prediction and reasons of a plan."""
    shape = f"{len(plan.stages)} stages, {plan.n_micro} micro-batches, {plan.schedule}"
    parts: list[RenderableType] = [Text(f"{plan.partitioner} plan: {shape}")]
    prediction = plan.prediction
    parts.append(_stages_table(plan, prediction, names))
    if prediction is not None:
        parts += [_links_table(plan, prediction, names), _verdict(prediction, names)]
    parts += [
        Text(
            f"{_name(names, plan.stages[s.source].worker)} > {_name(names, plan.stages[s.target].worker)}: "
            f"{s.reason}",
            style=DIM,
        )
        for s in plan.links
        if s.reason
    ]
    for worker, why in plan.left_out:
        parts.append(Text(f"left out: {_name(names, worker)}: {why}", style=DIM))
    return Group(*parts)


def _stages_table(plan: Plan, prediction: Prediction | None, names: Names) -> Table:
    table = _table("stage", "device", "ops", "compute a step", "busy", "memory", "of its limit")
    for index, stage in enumerate(plan.stages):
        row = [str(index), escape(_name(names, stage.worker)), f"{stage.start}-{stage.stop - 1}"]
        if prediction is not None and index < len(prediction.stages):
            found = prediction.stages[index]
            share = found.memory_bytes / found.memory_limit_bytes if found.memory_limit_bytes else 0.0
            row += [in_seconds(found.compute_s), share_bar(found.busy_share)]
            row += [in_bytes(found.memory_bytes), f"{share:.0%} of {in_bytes(found.memory_limit_bytes)}"]
        table.add_row(*row)
    return table


def _links_table(plan: Plan, prediction: Prediction, names: Names) -> Table:
    """Links with what they carry; with codec and ratio where compression was asked for."""
    from coordinator.ratios import label  # numpy, which most commands do without

    workers = [stage.worker for stage in plan.stages]
    specs = {(workers[spec.source], workers[spec.target]): spec for spec in plan.links}
    chosen = any(spec.reason for spec in plan.links)
    more = ("codec", "gradients", "of dense") if chosen else ()
    table = _table("link", "bytes a step", "busy a step", "busy", *more)
    for link in prediction.links:
        share = link.busy_s / prediction.step_s if prediction.step_s > 0 else 0.0
        pair = escape(f"{_name(names, link.source)} > {_name(names, link.target)}")
        row = [pair, in_bytes(link.bytes_per_step), in_seconds(link.busy_s), share_bar(share)]
        if chosen:
            spec = specs.get((link.source, link.target), LinkSpec(0, 0))
            kept = link.bytes_per_step / link.dense_bytes_per_step if link.dense_bytes_per_step else 1.0
            row += [label(spec), spec.mask.value, f"{kept:.1%}"]
        table.add_row(*row)
    return table


def _verdict(prediction: Prediction, names: Names) -> Table:
    table = Table.grid(padding=(0, 2))
    ratio = prediction.step_s / prediction.lower_bound_s if prediction.lower_bound_s > 0 else float("nan")
    table.add_row("predicted step", f"{in_seconds(prediction.step_s)}")
    table.add_row("lower bound", f"{in_seconds(prediction.lower_bound_s)} (the step is {ratio:.2f}x of it)")
    table.add_row("bottleneck", escape(f"{prediction.bottleneck}: {prediction.reason}"))
    if prediction.single_machine_s is not None:
        single = _name(names, prediction.single_machine)
        times = prediction.step_s / prediction.single_machine_s
        alone = (
            f"{in_seconds(prediction.single_machine_s)} on {single}, memory aside ({times:.2f}x the speed)"
        )
        table.add_row("one machine", escape(alone))
    for note in prediction.notes:
        table.add_row("note", escape(note))
    return table


# ---------------------------------------------------------------- fleets and jobs


def status_view(status: pb.StatusReply) -> RenderableType:
    """The coordinator at a glance."""
    names = worker_names(status.workers)
    parts: list[RenderableType] = [
        Text(f"coordinator atoll {status.version}, up {in_seconds(status.uptime_s)}"),
        _workers_table(status.workers),
        jobs_table(status.jobs),
    ]
    if status.links:
        parts.append(_rates_table(status.links, names))
    return Group(*parts)


def worker_names(workers: Iterable[pb.WorkerStatus]) -> dict[str, str]:
    """Worker id -> the name its owner gave it."""
    return {status.worker: status.name or status.worker for status in workers}


def _workers_table(workers: Sequence[pb.WorkerStatus]) -> RenderableType:
    if not workers:
        return Text("no workers; start some with `atoll-worker join HOST:PORT --token T`", style=DIM)
    table = _table("worker", "name", "state", "device", "speed", "memory", "job", "seen", "why")
    for worker in workers:
        device = f"{worker.device.kind} x{worker.device.threads}" if worker.device.kind else "?"
        at = f"{worker.job} stage {worker.stage}" if worker.job else ""
        table.add_row(
            worker.worker,
            escape(worker.name),
            worker.state,
            device,
            f"{worker.gflops:.0f} GFLOP/s" if worker.gflops else "",
            in_bytes(worker.device.memory_limit_bytes),
            at,
            f"{worker.seen_s_ago:.1f} s ago",
            escape(worker.reason),
        )
    return table


def jobs_table(jobs: Sequence[pb.JobUpdate]) -> RenderableType:
    """One row a job."""
    if not jobs:
        return Text("no jobs; submit one with `atoll submit JOBFILE`", style=DIM)
    table = _table("job", "name", "state", "step", "loss", "held-out", "step time", "ETA", "why")
    for job in jobs:
        table.add_row(
            job.job,
            escape(job.name),
            job.state,
            f"{job.step}/{job.steps}",
            _optional(job, "loss", "{:.4f}"),
            _optional(job, "eval_loss", "{:.4f}"),
            in_seconds(job.step_s) if job.HasField("step_s") else "",
            in_seconds(job.eta_s) if job.HasField("eta_s") else "",
            escape(job.reason),
        )
    return table


def _rates_table(links: Sequence[pb.LinkStatus], names: Names) -> Table:
    table = _table("link", "rate", "one way", "shares")
    for link in links:
        pair = escape(f"{_name(names, link.source)} > {_name(names, link.target)}")
        rate = in_bits(link.bandwidth_bps) if link.bandwidth_bps else "?"
        table.add_row(pair, rate, in_seconds(link.latency_s), escape(link.shared))
    return table


# ---------------------------------------------------------------- a running job


def watch_view(update: pb.JobUpdate, losses: Sequence[float], names: Names) -> RenderableType:
    """A running job: progress, loss, stages and links."""
    done = update.step / update.steps if update.steps else 0.0
    head = Table.grid(padding=(0, 2))
    head.add_row(
        "job", escape(f"{update.job} {update.name}"), f"[bold]{update.state}[/]", escape(update.reason)
    )
    head.add_row("step", f"{update.step}/{update.steps}", share_bar(done, 24), _pace(update))
    loss = _optional(update, "loss", "{:.4f}")
    head.add_row("loss", loss, sparkline(losses), _optional(update, "eval_loss", "held-out {:.4f}"))
    parts: list[RenderableType] = [head]
    if update.stages:
        parts.append(_busy_table(update.stages, names))
    if update.links:
        parts += [_carried_table(update.links, names), *_reasons(update.links, names)]
    return Group(*parts)


def watch_line(update: pb.JobUpdate, told: str = "") -> str:
    """A running job in one line, for logs and pipes; a reason already ``told`` is not repeated."""
    words = [f"{update.job} {update.state}", f"step {update.step}/{update.steps}"]
    words += [_optional(update, "loss", "loss {:.4f}"), _optional(update, "eval_loss", "held-out {:.4f}")]
    words += [_pace(update)]
    if update.stages:
        shares = " ".join(f"{stage.busy_share:.0%}" for stage in update.stages)
        words.append(f"busy {shares}")
    if update.links:
        words.append("links " + " ".join(f"{link.bps / 1e6:.1f}" for link in update.links) + " Mbit/s")
        coded = [codec_label(link) for link in update.links]
        if any(label != "none" for label in coded):
            words.append("codecs " + " ".join(coded))
    if update.reason != told:
        words.append(update.reason)
    return ", ".join(word for word in words if word)


def codec_label(link: pb.LinkRate) -> str:
    """What the link's tensors go through: topk:31.2, bf16, none."""
    return f"{link.codec}:{link.ratio:.3g}" if link.ratio > 1.0 else link.codec


def _carried_table(links: Sequence[pb.LinkRate], names: Names) -> Table:
    table = _table("link", "used", "can carry", "a step", "of dense", "codec")
    for link in links:
        dense = link.dense_bytes_per_step
        table.add_row(
            escape(f"{_name(names, link.source)} > {_name(names, link.target)}"),
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


def _pace(update: pb.JobUpdate) -> str:
    words = [_optional(update, "samples_per_s", "{:.1f} samples/s")]
    if update.HasField("step_s"):
        words.append(f"{in_seconds(update.step_s)} a step")
    if update.HasField("eta_s"):
        words.append(f"ETA {in_seconds(update.eta_s)}")
    return ", ".join(word for word in words if word)


def _busy_table(stages: Sequence[pb.StageStatus], names: Names) -> Table:
    table = _table("stage", "device", "busy", "forward", "backward")
    for stage in stages:
        table.add_row(
            str(stage.stage),
            escape(_name(names, stage.worker)),
            share_bar(stage.busy_share),
            in_seconds(stage.forward_s),
            in_seconds(stage.backward_s),
        )
    return table


# ---------------------------------------------------------------- helpers


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style=DIM)
    for column in columns:
        table.add_column(column)
    return table


def _name(names: Names, worker: str) -> str:
    return names.get(worker) or worker


def _optional(message: pb.JobUpdate, field: str, form: str) -> str:
    # Typed as a plain name since presence is asked by name in protobuf.
    return form.format(getattr(message, field)) if message.HasField(field) else ""  # type: ignore[arg-type]
