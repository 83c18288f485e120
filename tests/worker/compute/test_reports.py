"""A host's answer on the wire: its rows, means over them, and how large they are."""

from __future__ import annotations

import pytest

from atoll.messages.from_worker import EvaluatedRow, Row
from atoll.messages.to_worker import Blob, Model, TrainRound
from compressors.container import Stored
from coordinator.messages import events as ev
from coordinator.services.workers.wire import message_from
from protos.session import to_coordinator
from strategies.fixed import FixedSums, Grid
from worker.compute import reports
from worker.federated.orders import Assessment, HostAnswer, Update

MODEL = Model(Blob("cd" * 32, 10))
ORDER = TrainRound("job-1", 3, MODEL, "none", 1.0, 60.0, 7, "0123456789abcdef", ("x",), 100, 6000)
GRID = Grid({"trained": 6000.0, "averaged": 6000.0}, {"samples": 6000.0, "weight": 6000.0})


def answer(clients: int, refused: int = 0) -> HostAnswer:
    rows = {f"client-{at:04d}": Row(60 + at, 6, 0.5 + at, 0.25, 0.125, 178_000) for at in range(clients)}
    sums = FixedSums(
        GRID, {}, dict.fromkeys(GRID.weights, 2**60), dict.fromkeys(GRID.scalars, 2**60), clients
    )
    why = {f"client-9{at:03d}": "the local loss is nan" for at in range(refused)}
    return HostAnswer(Stored("ab" * 32, 170_000) if rows else None, sums, rows, why, stateful=True)


def sent(found: HostAnswer) -> ev.UpdateReady:
    update = Update(found, 0.0, found.stored, 1.5, 170_000, 0.1, 0, 0.0)
    read = message_from(to_coordinator(reports.update_ready(ORDER, update)))
    assert isinstance(read, ev.UpdateReady)
    return read


def test_rows_and_bounds_arrive_and_the_numbers_of_all_are_sums_and_means() -> None:
    read = sent(answer(3, refused=1))
    assert read.host is not None
    assert list(read.host.rows) == ["client-0000", "client-0001", "client-0002"]
    assert read.host.rows["client-0001"] == ev.Row(61, 6, 1.5, 0.25, 0.125, 178_000)
    assert read.host.refused == {"client-9000": "the local loss is nan"}
    assert (dict(read.host.loads), dict(read.host.sums)) == (
        dict.fromkeys(GRID.weights, 2**60),
        dict.fromkeys(GRID.scalars, 2**60),
    )
    assert (read.n_samples, read.steps, read.host.stateful) == (183, 18, True)
    assert read.metrics["loss"] == pytest.approx((60 * 0.5 + 61 * 1.5 + 62 * 2.5) / 183)


def test_an_answer_of_nobody_has_no_blob() -> None:
    read = sent(answer(0, refused=2))
    assert read.update == ""
    assert read.host is not None
    assert len(read.host.refused) == 2


def test_a_row_takes_less_than_200_bytes_and_so_does_a_client_of_an_order() -> None:
    sizes = [
        to_coordinator(
            reports.update_ready(ORDER, Update(answer(n), 0.0, answer(n).stored, 1.5, 1, 0.1, 0, 0.0))
        ).ByteSize()
        for n in (1, 101)
    ]
    assert (sizes[1] - sizes[0]) / 100 < 60


def test_an_evaluation_of_one_owner_keeps_its_figures_and_that_of_clients_has_their_means() -> None:
    alone = Assessment({"": EvaluatedRow(7, 0.1, {"accuracy": 0.3})}, 1.0, 0, 0.0)
    read = message_from(to_coordinator(reports.client_evaluated("job-1", 1, alone)))
    assert isinstance(read, ev.ClientEvaluated)
    assert (read.n_samples, read.loss, dict(read.metrics), dict(read.rows)) == (7, 0.1, {"accuracy": 0.3}, {})
    found = {"a": EvaluatedRow(1, 1.0, {"accuracy": 0.0}), "b": EvaluatedRow(3, 2.0, {"accuracy": 1.0})}
    read = message_from(to_coordinator(reports.client_evaluated("job-1", 1, Assessment(found, 1.0, 0, 0.0))))
    assert isinstance(read, ev.ClientEvaluated)
    assert (read.n_samples, read.loss, read.metrics["accuracy"]) == (4, 1.75, 0.75)
    assert read.rows["b"] == ev.EvaluatedRow(3, 2.0, {"accuracy": 1.0})
