"""A message is read by its class's type hints, and what breaks a bound is refused by the field's name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from atoll.errors import BadFrame, UsageError
from atoll.job import Optimizer, TrainingSpec
from atoll.messages.from_worker import Guest, Loaded, StepReady
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos.coding import read, write


@pytest.mark.parametrize(
    ("kind", "message", "why"),
    [
        (Optimizer, job_pb.Optimizer(name="adam"), r"Optimizer\.name 'adam' is unknown; known are sgd"),
        (Optimizer, job_pb.Optimizer(name="sgd", beta1=2.0), r"Optimizer\.betas.beta1 = 2.0"),
        (Optimizer, job_pb.Optimizer(name="sgd", lr=float("inf")), r"Optimizer\.lr = inf"),
        (StepReady, pb.StepReady(losses=[0.0] * 10_001), r"StepReady\.losses: 10001 entries; at most 10000"),
        (StepReady, pb.StepReady(job="j" * 16_385), r"StepReady\.job has 16385 characters"),
        (Loaded, pb.Loaded(clients=[pb.RosterEntry(client="c", n_samples=1)] * 2), "'c' is given twice"),
        (Guest, pb.GuestLimits(compute_share=1.0, upload_bps=1e16), r"Guest\.upload_bps = 1e\+16"),
    ],
)
def test_what_breaks_a_bound_is_refused_by_its_name(kind: type, message: object, why: str) -> None:
    with pytest.raises(BadFrame, match=why):
        read(kind, message)  # type: ignore[arg-type]


def test_what_a_message_cannot_carry_is_refused_before_it_travels() -> None:
    with pytest.raises(UsageError, match="64 bits"):
        write(TrainingSpec(1, 1, seed=2**64), job_pb.TrainingSpec)


def test_a_field_that_its_message_lacks_is_a_fault_of_ours() -> None:
    with pytest.raises(TypeError, match="Dismiss has no field why"):
        read(Wrong, pb.Dismiss())


@dataclass(frozen=True)
class Wrong:
    why: str
