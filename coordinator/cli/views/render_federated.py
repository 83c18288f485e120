"""Output of the `atoll` command for federated jobs: the round, its clients and what they measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import DIM, add_row, in_bits, in_bytes, in_seconds, sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from protos import atoll_control_pb2 as pb

    Names = Mapping[str, str]


def figures(metrics: Iterable[pb.Figure]) -> str:
    """Metrics in one line."""
    return ", ".join(f"{m.name} {m.value:.4f}" for m in metrics)


def federated_parts(update: pb.JobUpdate, losses: Sequence[float], names: Names) -> list[RenderableType]:
    """Below the head of a running job: rounds, evaluations, clients."""
    shown = update.federated
    head = FactTable.grid(padding=(0, 2))
    add_row(head, "strategy", shown.strategy, "data", shown.data)
    if shown.privacy:
        return _private_parts(update, head, names)
    told = f"{shown.arrived} of {shown.chosen} updates, {shown.dropped} dropped"
    took = f"{in_seconds(shown.round_s)} a round" if shown.HasField("round_s") else ""
    add_row(head, "round", told, took, f"up {in_bytes(shown.bytes_up)}, down {in_bytes(shown.bytes_down)}")
    loss = f"{update.loss:.4f}" if update.HasField("loss") else ""
    add_row(head, "training loss", loss, sparkline(losses), "")
    if shown.HasField("clients_loss"):
        add_row(head, "on clients", f"loss {shown.clients_loss:.4f}", figures(shown.clients_metrics), "")
    if shown.HasField("central_loss"):
        add_row(head, "on own data", f"loss {shown.central_loss:.4f}", figures(shown.central_metrics), "")
    parts: list[RenderableType] = [head]
    if shown.clients:
        parts.append(_clients(shown.clients, names))
    if shown.pace:
        parts.append(Text(f"ratios: {shown.pace}", style=DIM))
    return parts


def _private_parts(update: pb.JobUpdate, head: Table, names: Names) -> list[RenderableType]:
    shown = update.federated
    if shown.HasField("central_loss"):
        add_row(head, "on own data", f"loss {shown.central_loss:.4f}", figures(shown.central_metrics), "")
    clients = [_clients(shown.clients, names)] if shown.clients else []
    return [head, *clients, Text(f"privacy: {shown.privacy}")]


def short(privacy: str) -> str:
    """A private job's sentence without its conditions, for lines."""
    return privacy.partition(": ")[0].partition("; ")[0]


def federated_words(update: pb.JobUpdate) -> list[str]:
    """The same in a few words, for lines."""
    shown = update.federated
    if shown.privacy:
        own = f"own data ({figures(shown.central_metrics)})" if shown.central_metrics else ""
        return [own, f"privacy {short(shown.privacy)}"]
    words = [f"{shown.arrived} of {shown.chosen} updates" if shown.chosen else ""]
    if shown.dropped:
        words.append(f"{shown.dropped} dropped")
    if shown.HasField("clients_loss"):
        told = figures(shown.clients_metrics)
        words.append(f"clients {shown.clients_loss:.4f}" + (f" ({told})" if told else ""))
    if shown.central_metrics:
        words.append(f"own data ({figures(shown.central_metrics)})")
    words.append(f"up {in_bytes(shown.bytes_up)}, down {in_bytes(shown.bytes_down)}")
    left = [f"{c.worker}: {c.reason}" for c in shown.clients if c.reason and c.state != "gone"]
    return [*words, *left[:4]]


def _clients(clients: Sequence[pb.ClientStatus], names: Names) -> Table:
    heads = "client", "state", "samples", "loss", "metrics", "codec", "uplink", "train", "up", "down", "why"
    table = FactTable(*heads, header_style=DIM)
    for client in clients:
        codec = f"{client.codec}:{client.ratio:.3g}" if client.ratio > 1.0 else client.codec
        add_row(
            table,
            names.get(client.worker) or client.worker,
            client.state,
            str(client.n_samples) if client.n_samples else "",
            f"{client.loss:.4f}" if client.HasField("loss") else "",
            figures(client.metrics),
            codec,
            in_bits(client.uplink_bps) if client.uplink_bps else "",
            in_seconds(client.train_s) if client.train_s else "",
            in_bytes(client.bytes_up) if client.bytes_up else "",
            in_bytes(client.bytes_down) if client.bytes_down else "",
            client.reason,
        )
    return table
