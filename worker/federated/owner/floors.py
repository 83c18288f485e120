"""The least of which a data owner lets anything leave: samples, steps, clients. Asked at every turn.

A client knows of the other clients only what the job says, and the coordinator adds the updates up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import UsageError

if TYPE_CHECKING:
    from atoll.federated import Federated, Floors


def check_job(federated: Federated, floors: Floors) -> None:
    """Raise UsageError for a job whose rounds may close with fewer updates than this data owner demands."""
    if federated.min_clients < floors.clients:
        raise UsageError(
            f"the job's rounds may close with {federated.min_clients} updates, this data owner demands "
            f"{floors.clients}; raise the job's Federated(min_clients=...), or join with --min-clients "
            f"{federated.min_clients}"
        )


def check_update_floors(samples: int, steps: int, floors: Floors) -> None:
    """UsageError for an update of too few training ``samples`` or local ``steps``."""
    _enough("samples to train on", samples, floors.samples, "register more data", "--min-samples")
    _enough("distinct samples in a micro-batch", samples, floors.batch, "register more data", "--min-batch")
    _enough(
        "local steps a round",
        steps,
        floors.steps,
        "raise the job's local_epochs or local_steps",
        "--min-steps",
    )


def check_held_out(samples: int, batch: int, floors: Floors) -> None:
    """UsageError for metrics over means of fewer than ``floors.batch`` different samples."""
    found = min(samples, batch)
    _enough("held-out samples in a mean", found, floors.batch, "raise the job's held_out", "--min-batch")


def _enough(what: str, found: int, least: int, remedy: str, option: str) -> None:
    if found < least:
        raise UsageError(
            f"{found} {what}, this data owner demands {least}; {remedy}, or join with {option} {found}"
        )
