"""A running job in at most ten lines, none of which is longer than the terminal is wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from coordinator.cli.views.format import DIM, in_bits, in_bytes, in_seconds, reason_of, share_bar, sparkline
from coordinator.cli.views.render import codec_label, held_out_words, pace
from coordinator.cli.views.render_federated import figures
from protos import atoll_control_pb2 as pb

MOST_LINES = 10
STAGES_SHOWN = 4  # of more a summary is shown
LABEL, LOSSES, BAR = 10, 24, 20  # characters

Names = Mapping[str, str]  # worker id -> name for people


def brief_view(update: pb.JobUpdate, losses: Sequence[float], names: Names) -> RenderableType:
    """Progress, loss, stages, links and what else is to be known, the most important first."""
    rows = [
        *_head(update, losses),
        *(_federated(update) if update.HasField("federated") else _cut(update, names)),
    ]
    shown = [(label, words) for label, words in rows if words.strip()]
    return Group(
        *(
            Text.assemble((f"{label:<{LABEL}}", DIM), words, no_wrap=True, overflow="ellipsis")
            for label, words in shown[:MOST_LINES]
        )
    )


def _head(update: pb.JobUpdate, losses: Sequence[float]) -> Iterator[tuple[str, str]]:
    done = update.step / update.steps if update.steps else 0.0
    reason = f", {reason_of(update)}" if update.reason else ""
    yield "job", f"{update.job} {update.name}: {update.state}{reason}"
    what = "round" if update.HasField("federated") else "step"
    yield what, f"{update.step}/{update.steps}  {share_bar(done, BAR)}  {_soonest(update)}"
    loss = f"{update.loss:.4f}" if update.HasField("loss") else ""
    yield (
        "loss",
        "  ".join(word for word in (loss, sparkline(losses, LOSSES), held_out_words(update)) if word),
    )


def _soonest(update: pb.JobUpdate) -> str:
    """The pace, with the time that is left first: a narrow terminal cuts the end off."""
    *words, last = pace(update).split(", ")
    return ", ".join([last, *words] if update.HasField("eta_s") else [*words, last])


def _cut(update: pb.JobUpdate, names: Names) -> Iterator[tuple[str, str]]:
    """The stages of a job that is cut, its links, and what a loss costs."""
    stages = update.stages
    if len(stages) <= STAGES_SHOWN:
        for stage in stages:
            memory = stage.measured_bytes or stage.planned_bytes
            held = f"  {in_bytes(memory)}" if memory else ""
            spare = f"  {_name(names, stage.standby)} stands by" if stage.standby else ""
            took = in_seconds(stage.forward_s + stage.backward_s)
            busy = f"{share_bar(stage.busy_share)}  {took} a step"
            yield f"stage {stage.stage}", f"{_name(names, stage.worker)}  {busy}{held}{spare}"
    else:
        most = max(stages, key=lambda stage: stage.busy_share)
        devices = len({stage.worker for stage in stages})
        words = f"{len(stages)} on {devices} devices, {min(s.busy_share for s in stages):.0%} to "
        words += f"{most.busy_share:.0%} busy; most: stage {most.stage} on {_name(names, most.worker)}"
        yield "stages", words
    if update.links:
        link = max(update.links, key=lambda link: link.bps / link.measured_bps if link.measured_bps else 0.0)
        ends = f"{_name(names, link.source)} > {_name(names, link.target)}"
        rate = in_bits(link.bps) + (f" of {in_bits(link.measured_bps)}" if link.measured_bps else "")
        codec = codec_label(link)
        coded = f", codec {codec}" if codec not in ("", "none") else ""
        yield "links", f"{len(update.links)}, fullest {ends}: {rate}{coded}"
    yield "exchange", update.exchange
    yield "note", update.loss_now
    yield "checks", update.spot_checks


def _federated(update: pb.JobUpdate) -> Iterator[tuple[str, str]]:
    shown = update.federated
    yield "strategy", f"{shown.strategy} on data set {shown.data}"
    if shown.privacy:
        yield "privacy", shown.privacy
    else:
        dropped = f", {shown.dropped} dropped" if shown.dropped else ""
        yield "updates", f"{shown.arrived} of {shown.chosen}{dropped}"
        yield "traffic", f"up {in_bytes(shown.bytes_up)}, down {in_bytes(shown.bytes_down)}"
    if shown.HasField("clients_loss"):
        yield "clients", f"loss {shown.clients_loss:.4f}  {figures(shown.clients_metrics)}"
    if shown.HasField("central_loss"):
        yield "own data", f"loss {shown.central_loss:.4f}  {figures(shown.central_metrics)}"
    waits = [f"{client.worker}: {client.reason}" for client in shown.clients if client.reason]
    yield "note", "; ".join(waits[:2])


def _name(names: Names, worker: str) -> str:
    return names.get(worker) or worker
