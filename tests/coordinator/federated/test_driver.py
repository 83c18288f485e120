"""Federated jobs in the scheduler: who is invited, who stays reserved, what a restart goes on with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.compression import Compression
from atoll.dataset_spec import DataSpec
from atoll.errors import BadFrame, UsageError
from atoll.federated import (
    ConsentWord,
    DatasetFacts,
    Federated,
    FederatedSpec,
    FieldFacts,
    Registered,
    parse_uplink,
)
from atoll.job import JobSpec, Optimizer, OptimizerName, TrainingSpec
from atoll.opdag import TensorMeta
from coordinator.federated.checks import check_federated, check_inputs, check_wrapped, misfit
from coordinator.federated.kinds.round import MAX_STRIKES
from coordinator.federated.rounds import LOAD_AGAIN_S, MAX_LOADS
from coordinator.federated.selection import selector_from_json, selector_to_json
from coordinator.membership import member
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.jobs import Phase
from coordinator.services.owners.views import job_update
from coordinator.services.workers.wire import introduction_from, message_from
from protos import atoll_control_pb2 as pb
from protos.coding import read, write
from protos.convert import from_proto, to_proto
from protos.telemetry import Event
from strategies import make_strategy
from strategies.oort import Oort
from strategies.selection import Candidate, Outcome
from tests.sim.scripted import HASH, Scripted

IMAGE, LABEL = FieldFacts("image", "uint8", (8, 8)), FieldFacts("label", "int32", ())
DIGITS = DatasetFacts("digits", 100, (IMAGE, LABEL))
INPUTS = {"x": TensorMeta((4, 8, 8), "float32"), "y": TensorMeta((4,), "int64")}
MODEL = ev.Blob("cd" * 32, 1000)


def spec(name: str = "fed", **options: Any) -> JobSpec:
    rule = Federated(**{"evaluate_every": 0, "min_clients": 1, **options})
    federated = FederatedSpec(rule, "digits", {"x": "image", "y": "label"})
    training = TrainingSpec(steps=3, n_micro=1)
    return JobSpec(name, training, HASH, HASH, {"w": HASH}, DataSpec((), 0, 4), None, federated=federated)


@dataclass
class Fleet(Scripted):
    """A scripted coordinator whose workers hold data; its aggregator knows the model."""

    holds: dict[str, tuple[DatasetFacts, ...]] = field(default_factory=dict)

    def carry_out(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.OpenAggregator(job, _, at_round):
                self.post(ev.AggregatorOpened(job, at_round, MODEL, INPUTS, ()))
            case do.AggregateRound(job, at_round, attempt):
                done = ev.Blob(f"{at_round:064x}", 10)
                self.post(ev.Aggregated(job, at_round, attempt, done, MODEL))
            case _:
                super().carry_out(instruction)

    def introduced(self, worker: str, incarnation: int) -> ev.Introduction:
        held = self.holds.get(worker, (DIGITS,))
        return replace(super().introduced(worker, incarnation), datasets=held)

    def loads(self, *workers: str, job: str = "job-1") -> None:
        for worker in workers:
            self.says(worker, ev.Loaded(job, 1))

    def answers(self, *workers: str, at_round: int, job: str = "job-1") -> None:
        for worker in workers:
            blob = f"{hash((worker, at_round)) % 2**64:064x}"
            self.says(worker, ev.UpdateReady(job, at_round, blob, 10, 90, 3, metrics={"loss": 0.5}))

    def phase(self, worker: str) -> member.Phase:
        return self.scheduler.roster.workers[worker].member.phase


def test_workers_that_hold_the_data_are_reserved_and_train() -> None:
    world = Fleet(holds={"w3": ()})
    world.join("w1", "w2", "w3")
    world.submit(what=spec())
    assert [world.phase(w).value for w in ("w1", "w2", "w3")] == ["assigned", "assigned", "pool"]
    world.loads("w1", "w2")
    for at_round in range(3):
        assert world.state().step == at_round
        world.answers("w1", "w2", at_round=at_round)
    assert world.state().phase is Phase.FINISHED
    world.wait(0.25)
    assert world.phase("w1") is member.Phase.POOL
    assert world.all(do.CloseAggregator)


def test_a_plan_uses_only_workers_that_take_no_part() -> None:
    world = Fleet(holds={"w3": (), "w4": ()})
    world.join("w1", "w2", "w3", "w4")
    world.submit(what=spec())
    world.submit("job-2", what=replace(spec(), federated=None, data=DataSpec((), 8, 1)))
    plan = world.state("job-2").plan
    assert plan is not None
    assert sorted(stage.worker for stage in plan.stages) == ["w3", "w4"]
    world.loads("w1", "w2")
    assert world.state().phase is Phase.TRAINING


def test_a_data_set_that_does_not_fit_is_told_and_its_worker_left_alone() -> None:
    odd = DatasetFacts("digits", 10, (FieldFacts("image", "uint8", (9, 9)), LABEL))
    world = Fleet(holds={"w2": (odd,)})
    world.join("w1", "w2")
    world.submit(what=spec())
    assert world.phase("w2") is member.Phase.POOL
    shown = job_update(world.scheduler, "job-1", 0.0).federated
    assert [(c.worker, c.state) for c in shown.clients] == [("w1", "loading"), ("w2", "unfit")]
    assert "samples of shape (9, 9)" in shown.clients[1].reason


def test_a_registration_beyond_what_may_count_is_logged_shown_and_not_tried_again() -> None:
    world = Fleet(holds={"w2": (replace(DIGITS, n_samples=2**40),)})
    world.join("w1", "w2")
    world.submit(what=spec())
    world.wait(1.0)
    assert world.phase("w2") is member.Phase.POOL
    shown = job_update(world.scheduler, "job-1", world.clock.now_s).federated
    assert [(c.worker, c.state) for c in shown.clients] == [("w1", "loading"), ("w2", "left out")]
    assert "at most 1000000 may count" in shown.clients[1].reason
    logged = [i for i in world.all(do.Log) if i.event == Event.CLIENT_DROPPED]
    assert [(i.fields["worker"], i.fields["reason"]) for i in logged] == [("w2", shown.clients[1].reason)]
    assert not world.to("w2", do.Participate)
    world.loads("w1")
    for at_round in range(3):
        world.answers("w1", at_round=at_round)
    assert world.state().phase is Phase.FINISHED


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ((IMAGE,), "has no field 'label'"),
        ((FieldFacts("image", "float64", (8, 8)), LABEL), "is float64"),
        ((IMAGE, FieldFacts("label", "float32", ())), "is float32"),
        ((IMAGE, LABEL), None),
    ],
)
def test_fields_must_go_into_the_inputs_without_loss(fields: tuple[FieldFacts, ...], why: str | None) -> None:
    wanted = spec().federated
    assert wanted is not None
    found = misfit(DatasetFacts("digits", 5, fields), wanted.inputs, INPUTS, 4)
    assert (found is None) if why is None else (found is not None and why in found)


def test_a_worker_that_joins_later_takes_part_from_the_next_round_on() -> None:
    world = Fleet()
    world.join("w1")
    world.submit(what=spec())
    world.loads("w1")
    world.join("w2")
    world.loads("w2")
    assert not world.to("w2", do.TrainRound)
    world.answers("w1", at_round=0)
    assert [m.round for m in world.to("w2", do.TrainRound)] == [1]


def test_a_dead_client_frees_the_round_and_comes_back_under_its_name() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec())
    world.loads("w1", "w2")
    world.answers("w1", at_round=0)
    world.lose("w2")
    world.wait(1.0)
    assert world.state().step == 1
    world.join("w2", incarnation=2)
    world.loads("w2")
    world.answers("w1", at_round=1)
    assert [m.round for m in world.to("w2", do.TrainRound)] == [0, 2]


def test_strikes_are_those_of_a_certificate_and_outlast_its_processes() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=replace(spec(), training=replace(spec().training, steps=8)))
    world.loads("w1", "w2")
    for at_round in range(MAX_STRIKES):
        assert world.to("w2", do.TrainRound)[-1].round == at_round
        world.says("w2", ev.ClientFailed("job-1", at_round, "no", "train"))
        world.join("w2", incarnation=at_round + 2)  # a new process under the same certificate
        world.loads("w2")
        world.answers("w1", at_round=at_round)
    assert world.phase("w2") is member.Phase.POOL
    world.answers("w1", at_round=MAX_STRIKES)
    assert world.to("w2", do.TrainRound)[-1].round == MAX_STRIKES - 1
    shown = {c.worker: c for c in job_update(world.scheduler, "job-1", 0.0).federated.clients}
    assert "3 rounds in a row" in shown["w2"].reason


def test_a_client_that_could_not_load_the_job_is_asked_again_a_few_times() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec(min_clients=2))
    world.loads("w1")
    for failed in range(1, MAX_LOADS + 1):
        world.says("w2", ev.ClientFailed("job-1", 0, "its compute process ended", "load"))
        assert len(world.to("w2", do.Participate)) == failed
        assert world.phase("w2") is member.Phase.POOL
        world.wait(LOAD_AGAIN_S * 2.0 ** (failed - 1) + 0.5)
    assert len(world.to("w2", do.Participate)) == MAX_LOADS
    world.wait(10 * LOAD_AGAIN_S)
    assert len(world.to("w2", do.Participate)) == MAX_LOADS
    world.join("w2", incarnation=2)  # a new process may
    world.loads("w2")
    assert [m.round for m in world.to("w2", do.TrainRound)] == [0]


def test_a_client_that_loads_at_the_second_try_trains() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec(min_clients=2))
    world.loads("w1")
    world.says("w2", ev.ClientFailed("job-1", 0, "its compute process ended", "load"))
    (shown,) = (c for c in job_update(world.scheduler, "job-1", 0.0).federated.clients if c.worker == "w2")
    assert "is asked again after 5 s" in shown.reason
    world.wait(LOAD_AGAIN_S + 0.5)
    world.loads("w2")
    assert [m.round for m in world.to("w2", do.TrainRound)] == [0]


def test_a_client_that_leaves_is_let_go() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec())
    world.loads("w1", "w2")
    world.says("w2", ev.Leaving("its owner needs the machine"))
    assert world.phase("w2") is member.Phase.LEFT
    world.answers("w1", at_round=0)
    assert world.state().step == 1


def test_a_restarted_coordinator_goes_on_at_the_round_in_flight_with_the_same_clients() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec(selector="bandwidth_aware"))
    world.loads("w1", "w2")
    world.answers("w1", "w2", at_round=0)
    world.answers("w1", at_round=1)
    world.restart()
    assert world.state().phase is Phase.PAUSED
    world.handle(ev.Tick())
    world.join("w1")
    world.loads("w1")
    # The other client of the last round is waited for.
    assert (world.state().phase, world.state().step) == (Phase.GATHERING, 1)
    world.join("w2")
    world.loads("w2")
    assert world.state().phase is Phase.TRAINING
    assert [m.round for m in world.to("w1", do.RoundTaken)] == [0]
    world.answers("w1", "w2", at_round=1)
    world.answers("w1", "w2", at_round=2)
    assert world.state().phase is Phase.FINISHED


def test_a_client_may_go_on_while_its_job_waits_for_it() -> None:
    world = Fleet()
    world.join("w1")
    world.submit(what=spec(min_clients=2))
    for _ in range(3):
        world.says("w1", ev.Heartbeat(world.clock.now_s, "job-1", 1, 0, 0, 0))
    assert not world.to("w1", do.Release)


def test_cancelling_lets_every_client_go() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec())
    world.loads("w1", "w2")
    world.handle(ev.CancelAsked("job-1"))
    assert world.state().phase is Phase.CANCELLED
    assert all(len(world.to(w, do.Release)) == 1 for w in ("w1", "w2"))


def test_a_full_disk_pauses_and_its_end_resumes() -> None:
    world = Fleet()
    world.join("w1")
    world.submit(what=spec())
    world.loads("w1")
    world.handle(ev.StorageFailed("the disk is full"))
    assert world.state().phase is Phase.PAUSED
    world.handle(ev.StorageRecovered())
    world.loads("w1")
    assert (world.state().phase, world.state().step) == (Phase.TRAINING, 0)
    world.handle(ev.AggregatorBroke("job-1", "the disk is full", storage=True))
    assert world.state().phase is Phase.PAUSED
    world.wait(6.0)
    world.loads("w1")
    assert world.state().phase is Phase.TRAINING


def test_only_federated_jobs_resume_federated_ones() -> None:
    world = Fleet()
    world.submit(what=spec())
    plain = replace(spec(), federated=None, data=DataSpec((), 8, 1), resume_of="job-1")
    assert "a job of another kind" in (world.scheduler.refusal(plain) or "")
    other = replace(spec(strategy="scaffold"), resume_of="job-1")
    assert "take the same strategy" in (world.scheduler.refusal(other) or "")


# ---------------------------------------------------------------- what is declared, and the wire


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clients": 2, "min_clients": 3}, "cannot bring the 3 updates"),
        ({"held_out": 0.0}, "nothing to evaluate on"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"max_samples": 0}, "max_samples = 0; give a whole number from 1"),
        ({"max_samples": 2**40}, "max_samples"),
        ({"uplink": "auto"}, "give off, lossless"),
        ({"downlink": "zip"}, "downlink"),
        ({"options": {"beta": [1]}}, "is a list"),
    ],
)
def test_figures_out_of_range_are_refused_with_the_next_move(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Federated(**options)


@pytest.mark.parametrize(
    ("options", "training", "why"),
    [
        ({"strategy": "fedwhat"}, {}, "no strategy"),
        ({"selector": "best"}, {}, "no selector"),
        ({"strategy": "opwa", "uplink": "topk:32"}, {}, "set error_feedback=False"),
        ({"uplink": "powersgd"}, {}, "cannot carry"),
        ({"uplink": "zip:3"}, {}, "codec"),
        ({"strategy": "krum", "clients": 2}, {}, "needs 5 updates"),
        ({"strategy": "scaffold"}, {"optimizer": Optimizer(OptimizerName.ADAMW)}, "SGD"),
        ({}, {"n_micro": 2}, "set n_micro=1"),
        ({}, {"compress": "topk:4"}, "uplink"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(
    options: dict[str, Any], training: dict[str, Any], why: str
) -> None:
    declared = TrainingSpec(**{"steps": 3, "n_micro": 1, **training})
    with pytest.raises(UsageError, match=why):
        check_federated(Federated(**options), declared)


def test_a_rule_that_changes_the_loss_needs_its_wrapper() -> None:
    with pytest.raises(UsageError, match="vhl_module import Vhl"):
        check_wrapped(make_strategy("vhl"), ["head.weight"])
    check_wrapped(make_strategy("vhl"), ["net.head.weight"])
    with pytest.raises(UsageError, match=r"missing \['y'\]"):
        check_inputs({"x": "image"}, ("x", "y"))


OPTIONS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
    st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(-1e6, 1e6), st.text("abc", max_size=9)),
    max_size=5,
)


@given(
    options=OPTIONS,
    chosen=OPTIONS,
    held=st.floats(0.01, 0.9),
    steps=st.integers(0, 10**6),
    samples=st.integers(1, 10**9),
)
def test_a_federated_job_survives_the_wire(
    options: dict[str, Any], chosen: dict[str, Any], held: float, steps: int, samples: int
) -> None:
    rule = Federated(
        options=options, selector_options=chosen, held_out=held, local_steps=steps, max_samples=samples
    )
    sent = FederatedSpec(rule, "digits", {"x": "image"})
    assert from_proto(to_proto(sent)) == sent
    job = replace(spec(), federated=sent)
    assert from_proto(to_proto(job)) == job


def test_a_job_from_before_there_was_a_bound_on_samples_gets_the_default() -> None:
    message = to_proto(spec(max_samples=5))
    message.federated.max_samples = 0
    found = from_proto(message).federated
    assert found is not None
    assert found.rule.max_samples == Federated().max_samples


def test_a_federated_job_that_brings_data_is_refused() -> None:
    message = to_proto(spec())
    message.data.n_samples = 5
    with pytest.raises(BadFrame, match="clients hold theirs"):
        from_proto(message)


def test_what_a_worker_says_of_its_data_is_bounded() -> None:
    stated = write(DIGITS, pb.DatasetFacts)
    assert read(DatasetFacts, stated) == DIGITS
    with pytest.raises(BadFrame, match="repeats"):
        introduction_from(pb.Introduction(datasets=[stated, stated]))
    for wrong in (
        pb.DatasetFacts(name="d", n_samples=0, fields=[pb.FieldFacts(name="x", dtype="int8")]),
        pb.DatasetFacts(name="d", n_samples=1, fields=[pb.FieldFacts(name="x", dtype="object")]),
        pb.DatasetFacts(name="../d", n_samples=1, fields=[pb.FieldFacts(name="x", dtype="int8")]),
        pb.DatasetFacts(name="d", n_samples=1, fields=[pb.FieldFacts(name="x", dtype="int8", shape=[0])]),
    ):
        with pytest.raises((BadFrame, UsageError)):
            introduction_from(pb.Introduction(datasets=[wrong]))


def test_a_clients_words_are_bounded() -> None:
    ready = pb.UpdateReady(job="j", round=1, update=pb.BlobRef(hash=HASH, size=5), n_samples=3, steps=2)
    found = message_from(pb.FromWorker(update_ready=ready))
    assert isinstance(found, ev.UpdateReady)
    assert (found.update, found.update_bytes, found.n_samples) == (HASH, 5, 3)
    for change in (
        {"train_s": float("nan")},
        {"upload_s": -1.0},
        {"update": pb.BlobRef(hash="x")},
        {"upload_bytes": 2**63},
        {"download_bytes": 2**64 - 1},
    ):
        wrong = pb.UpdateReady()
        wrong.CopyFrom(ready)
        wrong.MergeFrom(pb.UpdateReady(**change))  # type: ignore[arg-type]
        with pytest.raises(BadFrame):
            message_from(pb.FromWorker(update_ready=wrong))
    many = pb.ClientEvaluated(job="j", metrics={f"m{n}": 1.0 for n in range(65)})
    with pytest.raises(BadFrame, match="65 entries"):
        message_from(pb.FromWorker(client_evaluated=many))


def test_a_client_cannot_have_what_a_round_rests_on_deleted() -> None:
    fleet = Fleet()
    fleet.join("w-0", "w-1")
    fleet.submit("job-1", spec())
    fleet.loads("w-0", "w-1")
    mine = f"{7:064x}"
    for named in (MODEL.hash, mine):
        fleet.says("w-0", ev.UpdateReady("job-1", 9, named, 10, 90, 3))
    dropped = {blob for i in fleet.all(do.DropBlobs) for blob in i.blobs}
    assert dropped == {mine}


def test_registered_data_bring_nothing_but_the_owners_own() -> None:
    held = {"x": [[1.0], [2.0], [3.0], [4.0]], "y": [0, 1, 0, 1]}
    train, own = Registered("digits", {"x": "image", "y": "label"}, held).materialise(2)
    assert (train.spec.n_samples, train.spec.fields, train.arrays) == (0, (), {})
    assert own is not None
    assert (own.spec.n_samples, own.spec.shuffle_seed) == (4, None)
    assert parse_uplink("bcrs:8") == Compression("bcrs", 8.0)
    assert parse_uplink("bcrs") == Compression("bcrs", None)


def test_a_selectors_state_survives_the_journal() -> None:
    candidates = {name: Candidate(10, 1.0) for name in "abcd"}
    selector = Oort()
    names, state = selector.choose(selector.init(), candidates, 2, 0, 7)
    state = selector.learn(state, 0, {name: Outcome(1.5, 10, 2.0) for name in names})
    assert selector_from_json(selector_to_json(state)) == state
    assert selector_from_json(selector_to_json({"a": 3})) == {"a": 3}
    assert selector_from_json(selector_to_json(None)) is None


def test_a_worker_whose_data_owner_was_asked_is_free_until_it_is_invited_anew() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec(min_clients=2))
    for worker in ("w1", "w2"):
        world.says(worker, ev.ConsentSaid("job-1", ConsentWord.AWAITED, "not yet"))
    world.wait(0.25)
    assert world.state().phase is Phase.CONSENTING
    assert [world.phase(w) for w in ("w1", "w2")] == [member.Phase.POOL] * 2
    assert not world.to("w1", do.Release), "it holds nothing"
    world.wait(30.0)
    assert len(world.to("w1", do.Participate)) == 1, "nobody is asked twice"
    shown = job_update(world.scheduler, "job-1", world.clock.now_s).federated.clients
    assert [c.state for c in shown] == ["awaiting consent"] * 2
    world.says("w1", ev.ConsentSaid("job-1", ConsentWord.GIVEN, ""))
    world.says("w2", ev.ConsentSaid("job-1", ConsentWord.GIVEN, ""))
    world.wait(0.25)
    assert [len(world.to(w, do.Participate)) for w in ("w1", "w2")] == [2, 2]
    assert world.to("w1", do.Participate)[0].owner == "owner"
    world.loads("w1", "w2")
    for at_round in range(3):
        world.answers("w1", "w2", at_round=at_round)
    assert world.state().phase is Phase.FINISHED
    events = [i.event for i in world.all(do.Log)]
    assert events.count(Event.CONSENT_AWAITED) == events.count(Event.CONSENT_GIVEN) == 2


def test_a_refused_worker_is_let_go_and_shown_as_refused() -> None:
    world = Fleet()
    world.join("w1", "w2")
    world.submit(what=spec())
    world.says("w1", ev.ConsentSaid("job-1", ConsentWord.REFUSED, "its data owner refused: no"))
    world.loads("w2")
    world.wait(0.25)
    assert (world.state().phase, world.phase("w1")) == (Phase.TRAINING, member.Phase.POOL)
    (shown,) = [
        c
        for c in job_update(world.scheduler, "job-1", world.clock.now_s).federated.clients
        if c.worker == "w1"
    ]
    assert (shown.state, shown.reason) == ("refused", "its data owner refused: no")


@pytest.mark.parametrize("broken", [{"word": "perhaps"}, {"graph": "../x"}, {"job": ""}])
def test_a_word_that_is_none_is_malformed(broken: dict[str, str]) -> None:
    with pytest.raises(BadFrame):
        message_from(pb.FromWorker(consent=pb.ConsentSaid(**{"job": "job-1", "word": "given", **broken})))


def test_a_client_whose_owner_limits_it_is_expected_later_before_a_round_shows_it() -> None:
    world = Fleet()
    world.join("a", "b")
    world.submit("fed-1", spec())
    driver = next(d for d in world.scheduler.drivers if d.takes(spec()))
    state = driver.jobs["fed-1"]  # type: ignore[attr-defined]
    known = replace(state.clients["b"], train_s=2.0, uplink_bps=8e6)
    driver.jobs["fed-1"] = replace(state, clients={**state.clients, "b": known})  # type: ignore[attr-defined]
    world.says("b", ev.Heartbeat(0.0, "fed-1", 1, 0, 0, 0, guest=ev.Guest(compute_share=0.25)))
    clients = driver.jobs["fed-1"].clients  # type: ignore[attr-defined]
    assert (clients["b"].train_s, clients["b"].uplink_bps) == (8.0, 2e6)
    assert clients["a"].train_s == state.clients["a"].train_s
    # A pause takes it out of the round, as one that is gone, and it is invited again afterwards.
    world.says("b", ev.Heartbeat(0.0, "fed-1", 1, 0, 0, 0, guest=ev.Guest(paused="on battery")))
    assert not driver.uses("fed-1", "b")
    assert world.scheduler.roster.workers["b"].member.phase is member.Phase.POOL
    world.done.clear()
    world.says("b", ev.Heartbeat(0.0, "", 0, 0, 0, 0))
    assert [w for w, _ in world.messages(do.Participate)] == ["b"]
