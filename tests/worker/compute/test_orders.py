"""Orders are decoded where they are carried out, and what breaks a bound is refused there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.dataset_spec import DataSpec
from atoll.errors import AtollError, BadFrame
from atoll.federated import Federated, FederatedSpec
from atoll.job import Precision
from atoll.messages import to_worker as asked
from atoll.messages.to_worker import Era, PeerLink, Replay
from atoll.microbatch import ScheduleName
from atoll.opdag import leaf_refs
from atoll.plan import LinkSpec, Mask
from protos import atoll_control_pb2 as pb
from protos.coding import read
from protos.convert import to_proto
from protos.session import said_to_worker
from tests.worker.stage.steps.crew import TRAINING, assign, case, cut_evenly
from worker.session import events, wire
from worker.stage.assignment import Assignment, assigned
from worker.transport.contract import Paths

HASH = "a" * 64
LINK = LinkSpec(0, 1, "topk", 8.0, Mask.NONE, "the slowest link")
Change = Callable[[pb.Assign], object]


@pytest.fixture(scope="module")
def stage() -> Assignment:
    """The first of two stages, with its blobs."""
    made = case("mlp")
    given = assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.GPIPE, (LINK,))[0]
    links = (PeerLink("w-1", Paths((("192.0.2.1", 7701),), dial=True)),)
    states = {name: made.states[name] for name in sorted(given.states)}
    return replace(given, links=links, tensors=dict.fromkeys(made.tensors, HASH), states=states, first_step=4)


def sent(stage: Assignment) -> pb.Assign:
    """An assignment as the coordinator sends it."""
    data = DataSpec((), 8, 4)
    said = asked.Assign(
        stage.job, stage.version, stage.training, stage.program, stage.eval_program, stage.plan,
        tuple(asked.RankPeer(1, link) for link in stage.links), stage.tensors, stage.states,
        data, None, stage.first_step, None, (), 0,
    )  # fmt: skip
    return said_to_worker(said).assign


def loaded(m: pb.Assign) -> Assignment:
    return assigned(read(asked.Assign, m))


def test_an_assignment_passes_the_daemon_unread_and_comes_out_as_it_was_meant(stage: Assignment) -> None:
    event = wire.event_from(pb.ToWorker(assign=sent(stage)))
    assert isinstance(event, events.Assign)
    assert wire.links_of(event.peers) == stage.links
    assert loaded(event.message) == stage


def bad(**fields: object) -> Change:
    def change(m: pb.Assign) -> None:
        for name, value in fields.items():
            setattr(m, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (bad(job="j\u202e"), "job"),
        (bad(job=""), "job"),
        (lambda m: setattr(m.program.ops[0].node, "target", "x" * 5000), "target"),
        (lambda m: setattr(m.training, "n_micro", 0), "n_micro|micro"),
        (lambda m: setattr(m.plan, "schedule", "nonsense"), "schedule"),
        (lambda m: setattr(m.tensors[0], "blob", "../key"), "tensors"),
        (lambda m: setattr(m.tensors[0], "name", "n" * 5000), "tensor"),
        (lambda m: setattr(m.metas[0].meta, "dtype", "float3"), "dtype"),
        (lambda m: m.metas[0].meta.shape.append(1 << 62), "shape|elements|dimension|size"),
        (lambda m: setattr(m.peers[0].peer, "worker", "w\u202e"), "worker"),
        (lambda m: setattr(m.peers[0].peer.addresses[0], "port", 70_000), "port"),
        (lambda m: setattr(m, "rank", 2), "rank"),
    ],
)
def test_an_assignment_that_breaks_a_bound_is_refused(stage: Assignment, change: Change, why: str) -> None:
    message = sent(stage)
    change(message)
    with pytest.raises(AtollError, match=why):
        loaded(message)


def repeated(stage: Assignment) -> pb.Assign:
    """The assignment at step 9 with steps 4 to 8 to repeat, the links changed at 6."""
    message = sent(replace(stage, first_step=9))
    message.plan_version = message.plan.version = 7
    eras = [pb.PlanEra(plan_version=3, first_step=2), pb.PlanEra(plan_version=5, first_step=6)]
    eras[1].links.append(to_proto(LINK))
    scales = [1.0, 0.5, 1.0, 1.0, 0.25]
    message.replay.CopyFrom(pb.Replay(first_step=4, eras=eras, gradient_scales=scales, stores=[8]))
    return message


def test_steps_to_repeat_run_under_the_versions_of_then(stage: Assignment) -> None:
    found = loaded(repeated(stage))
    assert found.replay == Replay(4, (Era(3, 2, ()), Era(5, 6, (LINK,))), (1.0, 0.5, 1.0, 1.0, 0.25), (8,))
    assert [(first, era.version, era.plan.links) for first, era in found.eras] == [
        (2, 3, ()),
        (6, 5, (LINK,)),
        (9, 7, stage.plan.links),
    ]
    assert {era.plan.stages for _, era in found.eras} == {stage.plan.stages}


def test_other_workers_for_a_plans_stages_are_decoded_and_bounded(stage: Assignment) -> None:
    plan = replace(stage.plan, version=8)
    message = pb.Reconfigure(job="job", plan_version=8, step=5, plan=to_proto(plan), peers=sent(stage).peers)
    found = read(asked.Reconfigure, message)
    assert (found.plan.stages, found.plan.version, found.step) == (plan.stages, 8, 5)
    assert wire.links_of(found.peers) == stage.links
    message.plan_version = 9
    with pytest.raises(BadFrame, match="said to be version 9"):
        read(asked.Reconfigure, message)


def test_a_federated_job_is_decoded_and_its_batch_bounded(stage: Assignment) -> None:
    assert stage.eval_program is not None
    spec = FederatedSpec(Federated("fedavg"), "mine", {"x": "image"})
    said = asked.Participate(
        "f", 2, stage.training, spec, stage.program, None, stage.states, stage.tensors, 32
    )
    message = said_to_worker(said).participate
    found = read(asked.Participate, message)
    assert found == said
    for batch in (0, asked.MAX_BATCH + 1):
        message.batch = batch
        with pytest.raises(BadFrame, match="batch"):
            read(asked.Participate, message)


MODEL = pb.Model(full=pb.BlobRef(hash=HASH))


@pytest.mark.parametrize(
    "order",
    [
        pb.TrainRound(model=MODEL, codec="", ratio=8.0),
        pb.TrainRound(model=MODEL, codec="topk", ratio=0.5),
        pb.TrainRound(model=MODEL, codec="topk", ratio=float("nan")),
        pb.TrainRound(model=pb.Model(full=pb.BlobRef(hash="../x")), codec="none", ratio=1.0),
        pb.TrainRound(
            model=pb.Model(full=MODEL.full, delta=MODEL.full, base="../x"), codec="none", ratio=1.0
        ),
    ],
)
def test_a_round_that_breaks_a_bound_is_refused(order: pb.TrainRound) -> None:
    with pytest.raises(BadFrame):
        read(asked.TrainRound, order)


def test_ops_to_time_need_the_shapes_of_what_they_read() -> None:
    made = case("mlp")
    node = made.dag.ops[0]
    message = pb.ProbeOps(request=7, precision="bf16", ops=[pb.ProbeOp(signature="first", op=to_proto(node))])
    with pytest.raises(BadFrame, match="to time lacks the shape of"):
        read(asked.ProbeOps, message)
    leaves = {leaf.name: made.states[leaf.name].meta for leaf in leaf_refs(node)}
    for name, meta in leaves.items():
        message.ops[0].leaves.add(name=name, meta=to_proto(meta))
    found = read(asked.ProbeOps, message)
    assert (found.request, found.precision) == (7, Precision.BF16)
    assert (found.ops[0].node, found.ops[0].leaves) == (node, leaves)
    assert found.ops[0].inputs == tuple(leaves.values())
    message.precision = "fp3"
    with pytest.raises(BadFrame, match="precision"):
        read(asked.ProbeOps, message)
