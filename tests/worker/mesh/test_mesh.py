"""Real processes over gloo: a site's stage trains as one process does, and ends as one does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from atoll.mesh.layout import Inside, Kernel
from atoll.mesh.volumes import gathered_bytes, micro_volume, reduced_bytes, step_volume
from tests.patience import eventually
from tests.worker.mesh.site import Site, assigned_to, plain, site, train
from tests.worker.stage.steps.crew import TRAINING, Crew, case
from worker.cancel import Cancel
from worker.mesh.stage import MeshBroken, MeshStage
from worker.stage.op_marks import FLOOR_S

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = [Inside.SHARDS, Inside.TENSOR]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(2, tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_processes_train_as_one_does(two: Site, name: str, kind: Inside) -> None:
    train(two, name, kind, steps=3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", Inside.SEQUENCE),
        ("llama", Inside.RING),
        ("mixtral", Inside.EXPERTS),
        ("gpt2", Inside.DATA),
    ],
)
def test_they_divide_tokens_or_experts_or_rows_alone_too(two: Site, name: str, kind: Inside) -> None:
    train(two, plain(name), kind, steps=2)


@pytest.mark.parametrize("kind", BOTH)
def test_the_middle_stage_of_a_pipeline_is_a_sites(two: Site, kind: Inside) -> None:
    train(two, "gpt2", kind, steps=2, stages=3, rank=1)


@pytest.mark.parametrize("kind", [*BOTH, Inside.DATA, Inside.RING])
def test_a_step_sends_what_its_formulas_say(two: Site, kind: Inside) -> None:
    made = plain("llama") if kind is Inside.RING else case("llama")  # its attention draws dropout
    (assignment,) = assigned_to(made, kind)
    stage = two.stage(made, assignment)
    crew = Crew(made, [assignment], stages={0: lambda _: stage})
    crew.all("run_step", 0, Cancel())
    crew.all("apply", 0, 1.0)
    processes = two.leader.processes
    processes.sent_bytes = 0
    crew.all("run_step", 1, Cancel())
    shared = stage.shares.shared(stage.program)
    rings = [turn for turn in shared.turns.values() if turn.kernel is Kernel.RING_CAUSAL]
    assert len(rings) == 2 * (kind is Inside.RING)
    inputs = sum(
        gathered_bytes(meta.nbytes, 2) if name in shared.inputs else meta.nbytes
        for name, meta in made.dag.inputs.items()
    )
    norms = 2 * reduced_bytes(8 * len(stage.norm_names), 2)
    micros = TRAINING.n_micro * (micro_volume(shared, 2).n_bytes + inputs)
    assert processes.sent_bytes == micros + step_volume(shared, 2).n_bytes + norms


def test_a_matrix_is_held_in_halves(two: Site) -> None:
    made = case("llama")
    for kind, least in ((Inside.SHARDS, 0.52), (Inside.TENSOR, 0.75)):
        (assignment,) = assigned_to(made, kind)
        stage = two.stage(made, assignment)
        whole = sum(made.states[name].meta.elements for name in stage.trained)
        assert sum(p.numel() for p in stage.trained.values()) <= least * whole


def test_a_call_that_fails_in_its_midst_breaks_the_stage_and_the_next_one_works(two: Site) -> None:
    made = case("gpt2")
    (assignment,) = assigned_to(made, Inside.TENSOR)
    stage: MeshStage = two.stage(made, assignment)
    stage.begin_step(0)
    with pytest.raises(KeyError):  # the followers are in it, and wait
        stage.backward(3, {})
    with pytest.raises(MeshBroken):
        stage.finish_step()
    stage.discard()
    assert not two.deaths
    train(two, "gpt2", Inside.TENSOR, steps=1)


def test_where_a_follower_hangs_the_leader_shows_what_it_waits_for_until_the_deadline_ends_both(
    two: Site,
) -> None:
    made = case("gpt2")
    (assignment,) = assigned_to(made, Inside.TENSOR)
    stage, follower = two.stage(made, assignment), two.leader._followers[0].process.pid
    os.kill(follower, signal.SIGSTOP)
    stage.begin_step(0)
    forward = threading.Thread(target=stage.forward, args=(0, made.batches.of(0, 0), {}))
    forward.start()
    try:
        eventually(lambda: two.status.running().mark is not None)
        running = two.status.running()
        time.sleep(0.3)
        assert two.status.running() == running  # it waits in this very call
        assert running.mark is not None
        assert FLOOR_S <= running.mark.allowed_s < 2 * FLOOR_S
    finally:
        os.kill(follower, signal.SIGCONT)
        forward.join()
    assert two.status.running().mark is None


def test_a_follower_that_dies_is_missed_at_once(two: Site) -> None:
    victim = two.leader._followers[0].process.pid
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: bool(two.deaths))
    assert two.deaths == ["process 1 of the mesh ended (signal 9)"]
