"""New links over real connections: the bits of the same codecs in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.microbatch import ScheduleName
from benchmarks.oracle import every_link
from compressors import catalogue
from tests.inprocess.pipeline import LocalPipeline
from tests.patience import HUNG_S, eventually
from tests.worker.stage.steps.crew import TRAINING, Crew, assign, case, cut_evenly
from worker.cancel import Cancel
from worker.stage.reports import StepReport
from worker.transport.contract import Paths, TransportConfig
from worker.transport.network import PeerNetwork

STAGES = 2
PATIENT = TransportConfig(silence_s=HUNG_S / 2, reconnect_s=HUNG_S / 2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def networks() -> Iterator[dict[str, PeerNetwork]]:
    """Two workers' networks on loopback, connected."""
    found = {name: PeerNetwork(None, ("127.0.0.1", 0), config=PATIENT, name=name) for name in ("w-0", "w-1")}
    found["w-1"].admit("w-0")
    found["w-0"].meet("w-1", Paths((("127.0.0.1", found["w-1"].port),), dial=True), HUNG_S)
    eventually(lambda: found["w-1"].connected("w-0"))
    yield found
    for network in found.values():
        network.close()


def test_new_links_take_over_at_their_step_over_real_connections(
    networks: dict[str, PeerNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "MIN_BYTES", 64)
    made = case("gpt2")
    before, after = every_link("topk:4", STAGES), every_link("int8_block", STAGES)
    starts = cut_evenly(made.dag, STAGES)
    assignments = assign(made, starts, TRAINING, ScheduleName.ONE_F_ONE_B, before)
    crew = Crew(made, assignments, networks.__getitem__)
    programs, evaluations = made.programs(starts)
    pipeline = LocalPipeline(programs, TRAINING, made.tensors, eval_programs=evaluations, states=made.states)
    pipeline.relink(before)
    for step in range(6):
        if step == 3:
            pipeline.relink(after)
        batches = [made.batches.of(step, micro) for micro in range(TRAINING.n_micro)]
        expected = pipeline.step(step, batches)
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        assert [r.stage.step_loss.mean for r in reports if r.stage.losses] == [expected.loss]
        crew.all("apply", step, expected.gradient_scale)
        if step == 1:
            crew.all("relink", 2, 3, after)
    for run in crew.runs:
        run.close()
