"""Private jobs: who is drawn, when they end, what survives a restart, and that nothing else is told."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.privacy import Privacy
from compressors.model_file import read_model, write_sums
from coordinator.aggregation.server_half import Offered, ServerHalf
from coordinator.cli.views.render_federated import federated_parts, federated_words
from coordinator.federated import state as fed
from coordinator.federated.driver import FederatedDriver
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.facts import JobEnded, RoundClosed
from coordinator.messages.instructions import HostSums
from coordinator.messages.jobs import Phase
from coordinator.services.owners.views import job_update
from protos import convert
from strategies.files import parted, sums_arrays
from strategies.fixed import Accumulator
from strategies.privacy.accountant import planned
from strategies.privacy.private import UNIT, Private
from strategies.values import ClientUpdate
from tests.coordinator.aggregation.test_server_half import Server, made, prepared
from tests.coordinator.aggregation.test_whole_sums import closed, drawn_of
from tests.coordinator.federated import test_driver, test_population
from tests.coordinator.federated.lone_machine import LoneMachine, spec, update
from tests.coordinator.federated.test_driver import Fleet

SECRET = "7" * 64
DELTA = 1e-5


def job(rounds: int = 3, **options: Any) -> LoneMachine:
    wanted = {"noise": 1.0, "sampling": 0.5, **options}
    return Secret(spec(rounds, clients=4, evaluate_every=0, privacy=Privacy(**wanted)))


class Secret(LoneMachine):
    """An aggregator that has a secret, as the real one."""

    def step(self, event: fed.Event) -> list[fed.Todo]:
        if isinstance(event, ev.AggregatorOpened) and not event.secret:
            event = replace(event, secret=SECRET)
        return super().step(event)


def train(world: LoneMachine) -> None:
    """Let whoever was drawn answer, until the round closes."""
    at_round = world.state.round
    for name in world.state.chosen:
        world.says(
            name, update(name, at_round, metrics={"loss": 0.123456, "f1": 0.654321}, square_loss=0.0987)
        )


# ---------------------------------------------------------------- rounds and budget


def test_a_round_may_be_of_nobody_and_is_closed_and_counted_all_the_same() -> None:
    world = job(rounds=40, sampling=0.02)
    world.begin("a", "b")
    while not world.state.ended:
        train(world)
    told = world.facts(RoundClosed)
    assert len(told) == 40
    assert sum(not fact.participants for fact in told) > 20
    assert [fact.privacy.rounds for fact in told if fact.privacy] == list(range(1, 41))


def test_a_job_ends_before_the_round_that_would_exceed_its_budget() -> None:
    world = job(rounds=50, epsilon=9.0)
    world.begin("a", "b", "c")
    while not world.state.ended:
        train(world)
    assert world.state.phase is Phase.FINISHED
    assert 0 < world.state.round < 50
    privacy = world.state.federated.rule.privacy
    assert privacy is not None
    assert world.state.spent.epsilon(DELTA)[0] <= 9.0 < world.state.spent.after(privacy).epsilon(DELTA)[0]
    (ended,) = world.facts(JobEnded)
    assert "the privacy budget is spent" in ended.reason
    assert (
        len([m for name, m in world.said if isinstance(m, do.TrainRound) and m.round >= world.state.round])
        == 0
    )


def test_in_a_tree_each_client_trains_once_and_epsilon_is_the_trees() -> None:
    world = job(rounds=8, sampling=0.0, tree=4)
    world.begin("a", "b", "c", "d", "e")
    for _ in range(8):
        train(world)
    assert world.state.phase is Phase.FINISHED
    told = world.facts(RoundClosed)
    for begin in (0, 4):
        assert sorted(name for fact in told[begin : begin + 4] for name in fact.participants) == list("abcde")
    privacy = world.state.federated.rule.privacy
    assert privacy is not None
    assert world.state.spent.epsilon(DELTA)[0] == pytest.approx(planned(privacy, 8))
    assert world.state.spent.rdp["2"] == pytest.approx(2 * 6 / 2)  # three nodes a tree, z = 1


def test_what_is_spent_is_a_part_of_the_closed_rounds_fact_and_survives_a_restart() -> None:
    world = job(rounds=3)
    world.begin("a", "b", "c")
    train(world)
    train(world)
    fact = world.facts(RoundClosed)[-1]
    assert from_json(RoundClosed, json.loads(json.dumps(to_json(fact)))) == fact
    assert fact.privacy == world.state.spent
    assert fact.privacy is not None
    assert fact.privacy.rounds == 2


def test_a_restarted_coordinator_goes_on_with_what_was_spent() -> None:
    world = fleet(rounds=3)
    world.loads("w1", "w2", "w3")
    one_round(world)
    spent = driver(world).jobs["job-1"].spent
    assert spent.rounds == 1
    world.restart()
    assert driver(world).jobs["job-1"].spent == spent


def test_a_sum_that_is_asked_again_is_one_release() -> None:
    world = job(rounds=2)
    world.aggregator = False
    world.begin("a", "b")
    world.open()
    train(world)
    assert world.state.phase is Phase.AGGREGATING
    world.step(ev.AggregatorBroke("job-1", "killed"))
    world.open()
    asked = [item for item in world.todo if isinstance(item, do.AggregateRound)]
    assert len(asked) == 2
    world.sum(asked[-1])
    world.sum(asked[0])  # the answer of the one that was killed
    assert [fact.privacy.rounds for fact in world.facts(RoundClosed)] == [1]


def test_an_update_that_cannot_be_counted_is_a_contribution_of_nothing() -> None:
    world = job(sampling=1.0)
    world.begin("a", "b")
    world.bad = {"a", "b"}
    for _ in range(3):
        train(world)
    assert world.state.phase is Phase.FINISHED  # not repeated: that would tell
    assert not world.state.clients["a"].barred
    assert world.state.clients["a"].strikes == 0


def test_draws_need_the_aggregators_secret() -> None:
    world = LoneMachine(spec(clients=4, evaluate_every=0, privacy=Privacy(noise=1.0, sampling=0.5)))
    with pytest.raises(UsageError, match="a secret of fewer"):
        world.begin("a", "b")


def test_hosts_are_not_told_how_many_were_drawn() -> None:
    world = Secret(spec(1, clients=8, evaluate_every=0, privacy=Privacy(noise=1.0, sampling=0.5)))
    world.step(fed.Begin())
    world.step(fed.Invited("a", 1000))
    world.says("a", ev.Loaded("job-1", 1, population="f" * 64, clients=test_population.ROSTER))
    (given,) = world.heard("a", do.TrainRound)
    assert len(given.clients) not in (0, 8)
    assert (given.drawn, given.drawn_samples) == (8, 8)


# ---------------------------------------------------------------- leaks


PER_CLIENT = {
    "the loss of a client": r"0\.123456",
    "a metric of a client": r"0\.654321",
    "its squared loss": r"0\.0987",
    "why it failed": r"the local loss is nan",
}
OF_THE_ROUND = {
    "curves of clients": r"client/w\d",
    "who was drawn": r"\b(trained|dropped)\b",
    "how many arrived": r"\b(arrived|participants)\b",
    "how many dropped out": r"\blost\b",
    "bytes by client": r"bytes_(up|down)",
    "how many train, in the reason": r"clients train|summing \d",
}


def driver(world: Fleet) -> FederatedDriver:
    found = world.scheduler.driver_of("job-1")
    assert isinstance(found, FederatedDriver)
    return found


def fleet(rounds: int = 3) -> Fleet:
    world = SecretFleet()
    world.join("w1", "w2", "w3")
    private = test_driver.spec(clients=3, privacy=Privacy(noise=1.0, sampling=0.7))
    world.submit(what=replace(private, training=replace(private.training, steps=rounds)))
    return world


class SecretFleet(Fleet):
    """A fleet whose aggregator has a secret."""

    def carry_out(self, instruction: do.Instruction) -> None:
        if isinstance(instruction, do.OpenAggregator):
            opened = ev.AggregatorOpened(
                instruction.job, instruction.round, test_driver.MODEL, test_driver.INPUTS, (), SECRET
            )
            self.post(opened)
        else:
            super().carry_out(instruction)


def one_round(world: Fleet) -> list[str]:
    """A round in which somebody fails where two or more were drawn; what the API shows meanwhile."""
    seen, state = list[str](), driver(world).jobs["job-1"]
    at_round = state.round
    for at, name in enumerate(state.chosen):
        if at == 0 and len(state.chosen) > 1:
            world.says(name, ev.ClientFailed("job-1", at_round, "the local loss is nan at step 3", "train"))
            continue
        figures = {"metrics": {"loss": 0.123456, "f1": 0.654321}, "square_loss": 0.0987}
        world.says(name, ev.UpdateReady("job-1", at_round, f"{at_round:032x}{at:032x}", 10, 90, 3, **figures))
        seen.append(str(job_update(world.scheduler, "job-1", world.clock.now_s)))
    return seen


def test_ten_kinds_of_leak_are_in_no_journal_log_curve_or_answer() -> None:
    world = fleet(rounds=6)
    world.loads("w1", "w2", "w3")
    answers = []
    for _ in range(6):
        answers += one_round(world)
        answers.append(str(job_update(world.scheduler, "job-1", world.clock.now_s)))
    assert world.state().phase is Phase.FINISHED
    journal = json.dumps([to_json(fact) for fact in world.facts])
    logs = json.dumps([[i.event, i.fields] for i in world.all(do.Log)], default=str)
    curves = json.dumps([[i.name, i.value] for i in world.all(do.Measured)])
    shown = "\n".join(answers)
    for what, pattern in PER_CLIENT.items():
        for place, text in (("journal", journal), ("log", logs), ("curves", curves), ("API", shown)):
            assert not re.search(pattern, text), f"{what} is in the {place}"
    for what, pattern in OF_THE_ROUND.items():
        for place, text in (("log", logs), ("curves", curves), ("API", shown)):
            assert not re.search(pattern, text), f"{what} is in the {place}"
    assert "w1" in shown  # that it has joined is no secret
    assert "-DP after 6 rounds" in shown
    assert {item.name for item in world.all(do.Measured)} == {"learning_rate", "epsilon"}


def test_the_same_places_do_hold_them_in_a_job_without_privacy() -> None:
    """The patterns above find what they look for."""
    world = Fleet()
    world.join("w1", "w2", "w3")
    world.submit(what=test_driver.spec())
    world.loads("w1", "w2", "w3")
    answers = []
    for _ in range(3):
        answers.append(str(job_update(world.scheduler, "job-1", world.clock.now_s)))
        answers += one_round(world)
        answers.append(str(job_update(world.scheduler, "job-1", world.clock.now_s)))
    found = "\n".join(
        [
            json.dumps([to_json(fact) for fact in world.facts]),
            json.dumps([[i.event, i.fields] for i in world.all(do.Log)], default=str),
            json.dumps([[i.name, i.value] for i in world.all(do.Measured)]),
            *answers,
        ]
    )
    missed = [
        what for what, pattern in {**PER_CLIENT, **OF_THE_ROUND}.items() if not re.search(pattern, found)
    ]
    assert missed == ["its squared loss"]  # which only selectors learn from


# ---------------------------------------------------------------- sums on files


PRIVATE = {
    "local": ("*running_mean", "*running_var"),
    "clients": 5,
    "evaluate_every": 0,
    "privacy": Privacy(noise=1.0, clip=0.5),
}


def silent(half: ServerHalf) -> ServerHalf:
    """A server half without noise, for its sums' sake."""
    rule = half.rule
    assert isinstance(rule, Private)
    half.rule = replace(rule, noise=lambda sigma, size: np.zeros(size, np.int64))
    return half


@pytest.mark.parametrize("adaptive", [None, 0.5])
def test_hosts_and_single_clients_make_the_same_private_sum(tmp_path: Path, adaptive: float | None) -> None:
    options = {**PRIVATE, "clients": 40, "privacy": Privacy(noise=1.0, clip=0.5, adaptive=adaptive)}
    server = made(tmp_path, **options)
    half = silent(server.half())
    half.open("", 5)
    each = {client: server.offer(half, at, 10 + at) for at, client in enumerate("abcde", 1)}
    alone = half.aggregate(0, each, 5, 0)
    assert alone.state is not None
    mixed: dict[str, Any] = {
        "host-1": private_host(server, half, {c: each[c] for c in "ab"}),
        "host-2": private_host(server, half, {c: each[c] for c in "cde"}),
    }
    found = closed(server, half, mixed, drawn_of(each))
    assert found.dropped == {}
    assert found.state is not None
    assert found.state.stored == alone.state.stored


def private_host(server: Server, half: ServerHalf, mine: dict[str, Offered]) -> HostSums:
    """The sum of a host that trained these clients."""
    rule = half.rule
    assert isinstance(rule, Private)
    assert half.state is not None
    core = rule.during(rule.configure(half.state).extra)
    held = Accumulator(core.round_grid(0, 0))
    for client, told in mine.items():
        delta, _ = parted(read_model(server.store.path(told.blob), half.update_metas))
        found = ClientUpdate(0, told.n_samples, told.steps, delta, {}, told.scalars, told.metrics, client)
        held.add(core.contribute(half.layout, found))
    path, sums = server.folder / "sums", held.sums()
    write_sums(path, sums_arrays(sums))
    samples = {client: told.n_samples for client, told in mine.items()}
    return HostSums(server.store.put(path.read_bytes()), samples, sums.loads, sums.scalars)


def test_a_round_of_no_update_changes_the_model_by_noise(tmp_path: Path) -> None:
    server = made(tmp_path, **PRIVATE)
    half = server.half()
    half.open("", 5)
    assert half.state is not None
    before = {name: np.array(array) for name, array in half.state.weights.items()}
    found = half.aggregate(0, {}, 5, 0)
    assert found.state is not None
    assert half.state.round == 1
    moved = np.concatenate([(half.state.weights[n] - before[n]).reshape(-1) for n in before])
    assert np.all(moved != 0.0)
    assert np.std(moved) == pytest.approx(0.5 / 5, rel=0.5)


def test_one_update_moves_a_private_model_by_no_more_than_its_share(tmp_path: Path) -> None:
    server = made(tmp_path, **PRIVATE)
    half = silent(server.half())
    half.open("", 5)
    assert half.state is not None
    before = {name: np.array(array, np.float64) for name, array in half.state.weights.items()}
    half.aggregate(0, {"a": server.offer(half, 1)}, 5, 0)
    moved = np.concatenate([(half.state.weights[n] - before[n]).reshape(-1) for n in before])
    assert np.linalg.norm(moved) == pytest.approx(0.5 / 5, rel=1e-3)
    assert UNIT == 2**24


# ---------------------------------------------------------------- the job file


def test_a_budget_becomes_a_noise_when_the_job_is_prepared() -> None:
    found = prepared(**{**PRIVATE, "clients": 50, "privacy": Privacy(epsilon=8.0, sampling=0.1)}).spec
    assert found.federated is not None
    privacy = found.federated.rule.privacy
    assert privacy is not None
    assert 0.3 < privacy.noise < 1.5
    assert convert.from_proto(convert.to_proto(found)) == found


def test_every_field_of_privacy_travels() -> None:
    settings: tuple[dict[str, Any], ...] = ({"sampling": 0.25}, {"tree": 12})
    for given in settings:
        privacy = Privacy(0.9, 3.0, 1e-6, 0.3, samples=40, per_layer=True, **given)
        rule = Federated(clients=60, evaluate_every=0, privacy=privacy)
        made_of = test_driver.spec()
        assert made_of.federated is not None
        whole = replace(made_of, federated=replace(made_of.federated, rule=rule))
        assert convert.from_proto(convert.to_proto(whole)) == whole
    assert len(fields(Privacy)) == 9


def test_a_private_job_does_not_go_on_with_anothers_state() -> None:
    world = fleet()
    plain, private = test_driver.spec(), driver(world).jobs["job-1"].spec
    for before, after in ((plain, private), (private, plain), (private, private)):
        assert "would begin at 0" in (driver(world).not_resumable(before, after) or "")
    assert driver(world).not_resumable(plain, plain) is None


def test_a_line_of_a_private_job_is_short_and_its_view_has_the_whole_sentence() -> None:
    world = fleet()
    world.loads("w1", "w2", "w3")
    one_round(world)
    shown = job_update(world.scheduler, "job-1", world.clock.now_s)
    words = ", ".join(federated_words(shown))
    assert re.fullmatch(r", privacy \([\d.]+, 1e-05\)-DP after 1 rounds", words)
    console = Console(width=400, file=io.StringIO(), record=True)
    for part in federated_parts(shown, [], {}):
        console.print(part)
    seen = console.export_text()
    assert "not covered: the coordinator itself" in seen
    assert "updates" not in seen
