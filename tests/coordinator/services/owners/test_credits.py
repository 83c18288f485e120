"""What workers have given, as owners, machines and a receipt have it: one fold, which a restart keeps."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.receipts import Receipt, checked
from tests.coordinator.serving import Owner, fleet, start
from tests.patience import HUNG_S
from worker.control.given import summed


def test_committed_steps_of_a_job_count_for_its_workers_and_a_restart_keeps_them(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start(stack, tmp_path)
        owner, workers = Owner(running), fleet(stack, running, 2)
        job = owner.submit(steps=6, n_micro=4)
        update = owner.watch(job)
        assert (update.state, len(update.stages)) == ("finished", 2)
        own = (
            rpc.WorkStub(workers[0]._channel)
            .Given(pb.Empty(), metadata=workers[0].metadata, timeout=HUNG_S)
            .credits
        )
        assert [row.worker for row in own] == [workers[0].worker], "one's own alone"
        assert summed(pb.CreditList(credits=own)).steps == 6
        credits = owner.call("Credits", pb.CreditsRequest()).credits
        assert {row.name for row in credits} == {"fake-0", "fake-1"}
        assert {row.worker for row in credits} == {worker.worker for worker in workers}
        assert all(0 <= row.useful.computed_ms <= 6 * 3_600_000 for row in credits)
        sums = [
            (row.useful.steps, row.useful.samples, row.discarded.steps, row.pending.steps) for row in credits
        ]
        assert sums == [(6, 6 * 4 * 8, 0, 0)] * 2
        signed = rpc.WorkStub(workers[0]._channel).Receipt(
            pb.Empty(), metadata=workers[0].metadata, timeout=HUNG_S
        )
        receipt = Receipt(signed.statement, signed.signature, signed.authority_pem)
        assert running.server is not None
        assert running.server.authority is not None
        said = checked(receipt, [running.server.authority.newest.certificate_pem])
        assert (said["machine"], said["name"]) == (workers[0].worker, "fake-0")
        assert [row["useful"]["steps"] for row in said["credits"]] == [6]
        running.stop()
        running = start(stack, tmp_path)
        assert list(Owner(running).call("Credits", pb.CreditsRequest()).credits) == list(credits)
