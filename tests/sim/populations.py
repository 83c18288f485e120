"""Populations in worlds: whom a worker speaks for, and what it answers to an order for some of them."""

from __future__ import annotations

from typing import Any

from coordinator.messages import events as ev
from tests.sim.clock import digest

CLIENTS = 9  # of a population
SAMPLES = 10  # of each


def roster(group: str) -> dict[str, int]:
    """Registered samples of a population's clients."""
    return {f"{group}-{at}": SAMPLES for at in range(CLIENTS)}


def answer(worker: str, job: str, order: Any) -> ev.UpdateReady:
    """The sum over the clients of an order, as the product's worker reports it."""
    rows = {client: ev.Row(SAMPLES, 2, 1.0, 1.0, 0.1) for client in order.clients}
    blob = digest("sum", worker, job, order.round, order.order)
    host = ev.HostRows(rows, {}, {}, {}, order=order.order)
    return ev.UpdateReady(job, order.round, blob, 1000, SAMPLES * len(rows), 2 * len(rows), host=host)
