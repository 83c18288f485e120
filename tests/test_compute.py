"""A stage's step over links: several stages in threads end in the bits of one stage alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from atoll.job import Optimizer, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.opdag import OpDag, StateMeta
from atoll.plan import Plan, StageSpec
from atoll.program import StageProgram, stage_programs
from coordinator.capture import capture
from coordinator.evaluation_cut import evaluation_intervals
from coordinator.traffic import Traffic
from tests.models import MODELS
from worker.arrivals import evaluation_arrivals, step_arrivals
from worker.assignment import Assignment, PeerLink
from worker.cancel import Cancel, Cancelled
from worker.compute import Progress, StageRun, StepReport
from worker.frames import Direction, MessageKey
from worker.link import Links
from worker.local import LocalPipeline
from worker.peer import PeerLost, Receiver
from worker.spans import Spans
from worker.stage import Stage
from worker.timed import TimedNetwork

TRAINING = TrainingSpec(
    steps=3, n_micro=4, seed=5, optimizer=Optimizer(lr=3e-3, weight_decay=0.01), eval_batches=6
)
JOIN_S = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Hub:
    """All workers' networks in one process: a message is delivered at once, on a copy."""

    def __init__(self) -> None:
        self.receivers: dict[str, Receiver] = {}
        self.sent: list[tuple[str, str, MessageKey]] = []

    def port(self, name: str) -> Port:
        return Port(self, name)


@dataclass
class Port:
    hub: Hub
    name: str

    def register(self, job: str, receiver: Receiver) -> None:
        self.hub.receivers[self.name] = receiver

    def unregister(self, job: str, receiver: Receiver) -> None:
        self.hub.receivers.pop(self.name, None)

    def forget(self, job: str, plan_version: int | None = None) -> None:
        pass

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
    ) -> None:
        self.hub.sent.append((self.name, peer, key))
        receiver = self.hub.receivers[peer]
        buffer = receiver.expect(self.name, key, len(payload))
        if buffer is not None:
            buffer[:] = payload
            receiver.deliver(self.name, key, header, buffer)


class Batches:
    """Seeded micro-batches without a coordinator."""

    def __init__(self, name: str) -> None:
        self.example = MODELS[name](dropout=0.1)

    def of(self, step: int, micro: int) -> dict[str, Tensor]:
        return self.example.make_batch(1000 * step + micro)

    def held_out(self) -> list[dict[str, Tensor]]:
        return [self.example.make_batch(10**6 + micro) for micro in range(TRAINING.eval_batches)]


@dataclass
class Given:
    """A feed that has everything already."""

    batches: Batches
    inputs: Sequence[str]
    done: list[int] = field(default_factory=list)

    def start(self, first_step: int) -> None:
        pass

    def take(self, step: int, micro: int, cancel: Cancel) -> dict[str, Tensor]:
        return {name: value for name, value in self.batches.of(step, micro).items() if name in self.inputs}

    def step_done(self, step: int) -> None:
        self.done.append(step)

    def close(self) -> None:
        pass


@dataclass
class Case:
    """A captured model, its batches, and what a plan needs."""

    name: str
    dag: OpDag
    evaluation: OpDag
    tensors: Mapping[str, Mapping[str, Tensor]]
    states: Mapping[str, StateMeta]
    batches: Batches

    def programs(self, starts: Sequence[int]) -> tuple[tuple[StageProgram, ...], tuple[StageProgram, ...]]:
        live = Traffic(self.evaluation, TRAINING.optimizer).live_bytes
        intervals = evaluation_intervals(self.dag, starts, self.evaluation, live)
        assert intervals is not None
        evaluations = stage_programs(self.evaluation, [begin for begin, _ in intervals])
        return stage_programs(self.dag, starts), evaluations


def case(name: str) -> Case:
    batches = Batches(name)
    example = batches.example
    captured = capture(example.module, example.example_inputs, TRAINING)
    assert captured.evaluation is not None
    dag = captured.train
    inputs = {n: StateMeta(meta) for n, meta in dag.inputs.items()}
    constants = {n: StateMeta(meta) for n, meta in {**dag.constants, **captured.evaluation.constants}.items()}
    states = {**dag.parameters, **captured.evaluation.buffers, **dag.buffers, **constants, **inputs}
    tensors = {n: {"value": t} for n, t in captured.state.items()}
    return Case(name, dag, captured.evaluation, tensors, states, batches)


def cut_evenly(dag: OpDag, stages: int) -> tuple[int, ...]:
    positions = dag.cuttable()
    return (0, *(positions[len(positions) * at // stages] for at in range(1, stages)))


def assign(
    made: Case, starts: Sequence[int], training: TrainingSpec, schedule: ScheduleName
) -> list[Assignment]:
    programs, evaluations = made.programs(starts)
    names = [f"w-{at}" for at in range(len(starts))]
    stages = tuple(
        StageSpec(start, start + 1, 0, 1, (names[at],), len(starts) - at - 1)
        for at, start in enumerate(starts)
    )
    plan = Plan("job", 1, "", "", "test", schedule, training.n_micro, stages)
    links = tuple(PeerLink(name, (), False) for name in names)
    return [
        Assignment("job", 1, training, p, evaluations[at], plan, links, {}, made.states, 0)
        for at, p in enumerate(programs)
    ]


class Crew:
    """One StageRun a stage, each step in threads of their own."""

    def __init__(self, made: Case, assignments: Sequence[Assignment]) -> None:
        self.made, self.hub = made, Hub()
        self.runs = [self.run_of(a) for a in assignments]
        for run in self.runs:
            run.open(0)

    def run_of(self, assignment: Assignment) -> StageRun:
        me = assignment.worker_of(assignment.stage)
        stage = Stage(
            assignment.program,
            assignment.eval_program,
            assignment.training,
            self.made.tensors,
            states=self.made.states,
        )
        program = assignment.eval_program
        assert program is not None

        def held_out(cancel: Cancel) -> Iterator[Mapping[str, Tensor]]:
            for batch in self.made.batches.held_out():
                yield {name: batch[name] for name in program.inputs}

        feed = Given(self.made.batches, assignment.program.inputs)
        spans = Spans()
        links = Links(TimedNetwork(self.hub.port(me), spans), "job", 1)
        return StageRun(assignment, stage, links, feed, held_out, spans, Progress())

    def all(self, work: str, *arguments: object) -> list[object]:
        results: list[object] = [None] * len(self.runs)

        def one(at: int) -> None:
            results[at] = getattr(self.runs[at], work)(*arguments)

        threads = [threading.Thread(target=one, args=(at,)) for at in range(len(self.runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        assert not any(thread.is_alive() for thread in threads)
        return results

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        merged: dict[str, dict[str, Tensor]] = {}
        for run in reversed(self.runs):
            merged.update(run.snapshot())
        return merged


def local(made: Case, training: TrainingSpec) -> tuple[LocalPipeline, list[float], list[float]]:
    """One stage in this process: losses of every step, and of the evaluations after each."""
    programs, evaluations = made.programs((0,))
    pipeline = LocalPipeline(programs, training, made.tensors, eval_programs=evaluations, states=made.states)
    losses, held_out = [], []
    for step in range(training.steps):
        batches = [made.batches.of(step, micro) for micro in range(training.n_micro)]
        losses.append(pipeline.step(step, batches).loss)
        held_out.append(pipeline.evaluate(made.batches.held_out()))
    return pipeline, losses, held_out


def assert_same(a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]) -> None:
    assert {n: sorted(t) for n, t in a.items()} == {n: sorted(t) for n, t in b.items()}
    for name, tensors in a.items():
        for key, value in tensors.items():
            assert torch.equal(value, b[name][key]), (name, key)


@pytest.mark.parametrize("schedule", list(ScheduleName))
@pytest.mark.parametrize("name", ["branches", "gpt2"])
def test_three_stages_over_links_end_in_the_bits_of_one(name: str, schedule: ScheduleName) -> None:
    made = case(name)
    reference, losses, held_out = local(made, TRAINING)
    crew = Crew(made, assign(made, cut_evenly(made.dag, 3), TRAINING, schedule))
    for step in range(TRAINING.steps):
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        assert len(reports) == 3
        assert [r.stage.loss for r in reports if r.stage.loss is not None] == [losses[step]]
        crew.all("apply", step, 1.0)
        found = [loss for loss in crew.all("evaluate", step, Cancel()) if loss is not None]
        assert found == [held_out[step]]
    assert_same(crew.snapshot(), reference.snapshot())


def test_a_discarded_step_leaves_no_trace() -> None:
    made = case("branches")
    reference, _, _ = local(made, TRAINING)
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    crew.all("run_step", 0, Cancel())
    for run in crew.runs:
        run.discard()
    for step in range(TRAINING.steps):
        crew.all("run_step", step, Cancel())
        crew.all("apply", step, 1.0)
    assert_same(crew.snapshot(), reference.snapshot())


def test_every_message_was_declared_by_its_receiver() -> None:
    made = case("gpt2")
    assignments = assign(made, cut_evenly(made.dag, 3), TRAINING, ScheduleName.ONE_F_ONE_B)
    crew = Crew(made, assignments)
    crew.all("run_step", 0, Cancel())
    crew.all("apply", 0, 1.0)
    crew.all("evaluate", 0, Cancel())
    declared = {
        (arrival.peer, a.worker_of(a.stage), arrival.key)
        for a in assignments
        for arrival in (*step_arrivals(a, 0), *evaluation_arrivals(a, 0))
    }
    assert set(crew.hub.sent) == declared
    assert len(crew.hub.sent) == len(declared)
    assert {key.direction for *_, key in declared} == set(Direction)


def test_a_cancelled_step_stops_while_it_waits_for_a_neighbour() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    cancel, ended = Cancel(), []

    def run() -> None:
        try:
            crew.runs[1].run_step(0, cancel)
        except Cancelled as stopped:
            ended.append(str(stopped))

    thread = threading.Thread(target=run)
    thread.start()
    cancel.set("released")
    thread.join(JOIN_S)
    assert ended == ["released"]


def test_a_lost_neighbour_ends_the_step_with_its_name() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    for receiver in crew.hub.receivers.values():
        receiver.lost("w-0", "connection reset")
    with pytest.raises(PeerLost, match="w-0"):
        crew.runs[1].run_step(0, Cancel())


def test_a_step_reports_its_times_and_spans() -> None:
    made = case("mlp")
    training = replace(TRAINING, n_micro=2)
    crew = Crew(made, assign(made, (0,), training, ScheduleName.GPIPE))
    report = crew.runs[0].run_step(0, Cancel())
    crew.runs[0].apply(0, 1.0)
    assert report.forward_s > 0
    assert report.backward_s > 0
    kinds = [span.kind for span in crew.runs[0].spans.take()]
    assert kinds == ["F", "B", "F", "B", "opt"] or kinds == ["F", "F", "B", "B", "opt"]
    assert crew.runs[0].run_step(1, Cancel()).optimizer_s > 0


def test_every_message_leaves_one_span_at_either_end() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.GPIPE))
    crew.all("run_step", 0, Cancel())
    spans = [run.spans.take() for run in crew.runs]
    for here, there in ((0, 1), (1, 0)):
        sent = [(s.micro, s.bytes) for s in spans[here] if s.kind == "send"]
        got = [(s.micro, s.bytes) for s in spans[there] if s.kind == "recv"]
        assert sent
        assert sorted(sent) == sorted(got)
    assert all(s.peer == "w-1" for s in spans[0] if s.kind in ("send", "recv"))
