"""The way from ``import atoll`` to a running coordinator, for scripts and notebooks.

    import atoll
    fleet = atoll.connect()
    run = fleet.train("job.py")
    run.progress()
    run.export("folder")

A door for users, as `atoll.hf` is: what is behind it stands on the coordinator's client, and nothing of
Atoll's own goes by it.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from atoll.errors import UsageError

if TYPE_CHECKING:
    from coordinator.notebook.fleet import Fleet

EXTRA = ("matplotlib", "networkx", "prometheus_client", "sqlalchemy")
"""Packages of the extra that submits jobs."""


def connect(
    coordinator: str | None = None,
    token: str | None = None,
    *,
    state_dir: str | PathLike[str] | None = None,
    insecure: bool = False,
) -> Fleet:
    """Return the fleet of a coordinator.

    ``coordinator``: its HOST:PORT. ``token``: the owner's. ``insecure``: it was started so. What is not given
    comes from ``ATOLL_COORDINATOR`` and ``ATOLL_TOKEN``, then from a state folder, where
    `atoll serve` on this machine leaves both: ``state_dir``, ``ATOLL_STATE`` or the default one.

    Raises UsageError, ConnectionFailed, AccessDenied or ProtocolMismatch.
    """
    try:
        from coordinator.notebook.fleet import connected  # slow to import
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise UsageError(
            f"atoll.connect needs {error.name}; install it with pip install 'atoll[coordinator]'"
        ) from None
    return connected(coordinator, token, state_dir, insecure=insecure)
