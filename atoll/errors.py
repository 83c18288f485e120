"""Every error a user can meet: what happened with its numbers, then the next move.

A message is one or two sentences, "what: numbers; what to do". The exit codes are those the
two commands document in their help. A peer's failure is an event, never one of these; our own
bug raises an ordinary Python exception.
"""

from __future__ import annotations


class AtollError(Exception):
    """Base of all errors shown to a user without a traceback."""

    exit_code = 1


class UsageError(AtollError):
    """A command, option, job file or configuration that cannot be used as given."""

    exit_code = 2


class CaptureError(AtollError):
    """The model cannot be captured as an op-DAG; names the op, module path and source line."""

    exit_code = 3


class SelfCheckError(CaptureError):
    """The captured DAG differs from the module; names the parameter, buffer or loss."""


class UnsupportedOp(CaptureError):
    """An op outside the allow-list of ``atoll.ops``."""


class PlanError(AtollError):
    """No valid plan exists for this model on this fleet; says by how much and where."""

    exit_code = 4


class NoWorkers(PlanError):
    """The fleet has no usable worker."""


class NotEnoughMemory(PlanError):
    """The fleet's memory budgets cannot hold the training state."""


class ConnectionFailed(AtollError):
    """The coordinator or a peer cannot be reached."""

    exit_code = 5


class AccessDenied(AtollError):
    """A token, certificate or identity was refused."""

    exit_code = 6


class ProtocolMismatch(AtollError):
    """The two ends speak different protocol versions."""

    exit_code = 7


class JobFailed(AtollError):
    """The job ended without its result (NaN loss, cancelled, lost workers)."""

    exit_code = 8


class StorageError(AtollError):
    """A disk is full, or a stored file is missing or damaged."""

    exit_code = 9


class BadFrame(AtollError):
    """A received frame is truncated, oversized, forged or malformed; the connection is closed."""

    exit_code = 10


class BadUpdate(BadFrame):
    """A participant's update cannot be counted (wrong round, names, shapes, not finite); its round
    closes without it."""
