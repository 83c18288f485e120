"""The pool before a model is captured, which may take minutes: is anybody there to plan with, or to train?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import NoWorkers
from hostos.command_line import err

if TYPE_CHECKING:
    from coordinator.client.client import Client

GONE = frozenset({"dead", "left"})
ANSWER_S = 60.0  # for a status: workers that start may keep the coordinator's machine busy


def workers_present(client: Client) -> int:
    """Return how many workers are connected, or may be back in a moment."""
    return sum(worker.state not in GONE for worker in client.status(ANSWER_S).workers)


def need_workers(client: Client) -> None:
    """NoWorkers where the pool is empty: there is nothing to plan with."""
    if not workers_present(client):
        raise NoWorkers(
            f"no worker is in the pool of {client.endpoint.address}; start some with `atoll-worker join`, or "
            "give --fleet FLEET.toml to plan for machines that are not there"
        )


def note_empty(client: Client, quiet: bool) -> None:
    """Say on the error stream that a job will wait where the pool is empty; nothing when ``quiet``."""
    if not workers_present(client) and not quiet:
        err.print(f"no worker is in the pool of {client.endpoint.address}: the job will wait until one joins")
