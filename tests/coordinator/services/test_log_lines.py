"""What `atoll logs` tells an owner besides the states of jobs and workers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundEvaluated, StepCommitted
from coordinator.services.workers import work as sessions
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from tests.coordinator.serving import Owner, fleet, start
from tests.patience import HUNG_S


def lines(owner: Owner, event: str, job: str = "") -> list[dict[str, Any]]:
    request = pb.LogsRequest(job=job)
    stream = owner.stub.Logs(request, metadata=owner.metadata, timeout=HUNG_S)
    return [json.loads(line.fields_json) for line in stream if line.event == event]


def test_evaluations_and_checkpoints_of_a_job_are_lines_of_its_log(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start(stack, tmp_path)
        fleet(stack, running, 2)
        owner = Owner(running)
        job = owner.submit(evaluate=True, eval_batches=1, eval_every=2, checkpoint_every=2)
        assert owner.watch(job).state == "finished"
        evaluated, stored = lines(owner, "job.evaluated", job), lines(owner, "checkpoint.stored", job)
    assert evaluated == [{"step": 2, "loss": 1.5}, {"step": 3, "loss": 1.5}]
    assert {line["tensors"] for line in stored} == {4}
    assert stored[-1]["step"] == 3


@pytest.mark.parametrize("where", ["clients", "central"])
def test_an_evaluation_of_a_round_says_on_whose_data(where: str) -> None:
    line = do.line_of(RoundEvaluated("j", 2, where, 0.5, {"accuracy": 0.75}, 100, 1))
    assert line == do.Log("job.evaluated", job="j", fields={"round": 2, "where": where, "loss": 0.5})


def test_a_committed_step_is_no_line() -> None:
    assert do.line_of(StepCommitted("j", 1, 0, 0.5, 0.0)) is None


def test_tokens_are_told_by_their_public_names(tmp_path: Path) -> None:
    with ExitStack() as stack:
        owner = Owner(start(stack, tmp_path))
        made = owner.call("CreateToken", pb.CreateTokenRequest(name="lab"))
        owner.call("RevokeToken", pb.TokenRequest(id=made.info.id))
        created, revoked = lines(owner, "token.created"), lines(owner, "token.revoked")
    assert created[-1] == {"token": made.info.id, "name": "lab"}
    assert revoked == [{"token": made.info.id}]


def test_a_worker_that_is_not_let_in_is_told_with_the_reason_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REFUSALS", 2)
    monkeypatch.setattr(sessions, "REFUSALS_PER_S", 0.0)
    with ExitStack() as stack:
        running = start(stack, tmp_path)
        for worker in fleet(stack, running, 3, protocol=PROTOCOL_VERSION + 1):
            assert worker.ended.wait(HUNG_S)
        told = lines(Owner(running), "session.refused")
    assert len(told) == 2
    assert "update the older of the two" in told[0]["reason"]
    assert told[0]["peer"].startswith("ipv4:127.0.0.1:")
