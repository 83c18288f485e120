"""Secure rounds of real workers and the real aggregator: the bits of plain sums, whoever is lost when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.federated import Floors
from atoll.messages import to_worker as asked
from atoll.messages.from_worker import SecureAnswer
from atoll.secure import Secure, Stage
from compressors.model_file import read_masked, write_masked
from coordinator.federated import state as fed
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.jobs import Phase
from tests.inprocess.secure_federation import Plain, SecureFederation
from tests.parameters import sampled
from tests.strategies.own.tutorial import tutorial

NAMES = ("w1", "w2", "w3", "w4", "w5", "w6")


def secure(folder: Path, names: tuple[str, ...] = NAMES, **options: Any) -> SecureFederation:
    lost, floors = options.pop("lost", {}), options.pop("floors", Floors(2, 1, 1, 2, counted=False))
    wanted = {"secure": Secure(), "local_steps": 2, **options}
    return SecureFederation(folder, names, wanted, lost, floors)


def plain(folder: Path, of: SecureFederation) -> Plain:
    options = {name: value for name, value in of.options.items() if name != "secure"}
    found = Plain(folder, of.names, options, floors=of.floors)
    found.counted = {fact.round: list(fact.participants) for fact in of.facts()}
    found.members = {ask.round: ask.opening.shared for ask in of.asks if ask.opening is not None}
    found.bits = of.options["secure"].bits
    return found


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(a, other[n]) for n, a in one.items())


@pytest.mark.parametrize(
    ("strategy", "bits", "uplink"),
    sampled(
        2,
        [
            ("fedavg", 24, "off"),
            ("fedavg", 34, "off"),
            ("fedavg", 24, "random_k:3"),
            ("fedavgm", 16, "off"),
            ("fedadam", 24, "off"),
            ("fedprox", 24, "off"),
            ("scaffold", 24, "off"),
            ("fedbn", 24, "random_k:3"),
        ],
    ),
)
def test_five_rounds_end_with_the_bits_of_plain_sums(
    tmp_path: Path, strategy: str, bits: int, uplink: str
) -> None:
    made = secure(tmp_path / "secure", NAMES[:4], strategy=strategy, secure=Secure(bits=bits), uplink=uplink)
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    if uplink == "off":
        other = plain(tmp_path / "plain", made)
        other.run()
        assert same(made.weights(), other.weights())
    sizes = {update.update_bytes for ask in made.asks for update in ask.updates.values()}
    assert len(sizes) == 1


def test_a_third_that_is_lost_at_any_stage_costs_nothing_but_its_updates(tmp_path: Path) -> None:
    """Each of the five rounds loses two of six, at a stage of its own."""
    lost = {(at, stage): (NAMES[at], NAMES[(at + 3) % 6]) for at, stage in enumerate(Stage)}
    made = secure(tmp_path / "secure", lost=lost)
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    for fact, ((_, stage), gone) in zip(made.facts(), lost.items(), strict=True):
        before = stage in (Stage.KEYS, Stage.SHARES, Stage.VECTORS)
        assert sorted(fact.participants) == [n for n in NAMES if not (before and n in gone)], stage
        assert sorted(fact.dropped) == (sorted(gone) if before else []), stage
    assert len(made.asks) == 5
    other = plain(tmp_path / "plain", made)
    other.run()
    assert same(made.weights(), other.weights())


def test_one_member_too_few_repeats_the_round_with_its_reason_and_opens_nothing(tmp_path: Path) -> None:
    class Once(SecureFederation):
        """Three of six lose round 1's first attempt after their vectors came."""

        def tells(self, worker: str, message: Any) -> None:
            signs = isinstance(message, SecureAnswer) and message.stage is Stage.SIGNATURES
            if not (signs and message.round == 1 and worker in NAMES[:3] and not self.state.repeats):
                super().tells(worker, message)

    made = Once(tmp_path, NAMES, {"secure": Secure(), "local_steps": 2})
    reasons = []
    made.begin()
    while not made.state.ended:
        made.step(made.queue.pop(0)) if made.queue else _tick(made)
        reasons.append(made.state.reason)
    assert made.state.phase is Phase.FINISHED
    assert [fact.round for fact in made.facts()] == [0, 1, 2, 3, 4]
    assert any("round 2 is repeated: 3 of 6 members signed, 4 must" in reason for reason in reasons)
    assert len(made.asks) == 5  # nothing was summed of the attempt that failed
    exchanges = [order.exchange for _, order in made.said if isinstance(order, asked.TrainRound)]
    assert len(set(exchanges)) == 6  # keys are fresh in the attempt that followed
    blobs = [update.update for ask in made.asks for update in ask.updates.values()]
    assert len(blobs) == len(set(blobs))
    told = [word for who, word in made.said if who == "w1" and isinstance(word, do.RoundTaken)]
    assert [word.taken for word in told] == [True, False, True, True, True, True]


def _tick(made: SecureFederation) -> None:
    made.now_s = max(made.now_s + 1.0, made.state.due_s)
    made.step(fed.Tick())


def test_an_interrupted_round_begins_anew_with_other_keys(tmp_path: Path) -> None:
    made = secure(tmp_path)
    made.begin()
    for _ in range(14):
        made.step(made.queue.pop(0))
    assert made.state.secure is not None
    before = made.state.secure.name
    made.step(fed.Interrupted("the disk is full"))
    made.queue.clear()
    made.step(fed.Begin())
    for name in NAMES:
        made.step(fed.ClientBack(name))
        made.step(fed.FromClient(name, ev.Loaded("job-1", 1)))
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    orders = [order for _, order in made.said if isinstance(order, asked.SecureOrder)]
    later = {order.exchange for order in orders} - {before}
    assert len(later) == 5
    keys = {name: set() for name in NAMES}
    for order in orders:
        for name, held in order.roster.items():
            keys[name].add((order.exchange, held))
    for held in keys.values():
        publics = [each for _, key in held for each in (key.sealing, key.masking, key.signing)]
        assert len(publics) == len(set(publics))


def test_a_client_whose_process_died_is_lost_to_the_round_and_back_in_the_next(tmp_path: Path) -> None:
    made = secure(tmp_path)
    begun = made.says

    def says(worker: str, message: Any) -> None:
        if isinstance(message, asked.TrainRound) and message.round == 1 and worker == "w4":
            made.clients["w4"] = made.client("w4", NAMES.index("w4"))  # its keys are gone
        begun(worker, message)

    made.says = says  # type: ignore[method-assign]
    made.run()
    assert made.state.phase is Phase.FINISHED
    counted = ["w4" in fact.participants for fact in made.facts()]
    assert counted == [True, False, True, True, True]
    assert "no keys of that exchange" in made.facts()[1].dropped["w4"]


def test_nothing_of_a_single_client_is_told(tmp_path: Path) -> None:
    made = secure(tmp_path, strategy="scaffold")
    made.run()
    for ask in made.asks:
        for update in ask.updates.values():
            assert update.metrics in ({}, {"loss": 0.0})
            assert (update.square_loss, update.scalars) == (0.0, {})
    assert all(fact.loss is None for fact in made.facts())
    assert all(entry["metrics"] == {} for fact in made.facts() for entry in fact.participants.values())


def test_what_the_coordinator_stores_is_uniform(tmp_path: Path) -> None:
    from scipy.stats import chi2

    made = secure(tmp_path, NAMES[:3])
    made.run()
    sizes = (12 + 12 + 18 + 3, 2)  # of the layer, of its statistics, and of the scalars
    files = [made.server.store.path(held.update) for ask in made.asks for held in ask.updates.values()]
    words = [array for path in files for array in read_masked(path, sizes, np.dtype(np.uint32))]
    seen = b"".join(array.tobytes() for array in words)
    counts = np.bincount(np.frombuffer(seen, np.uint8), minlength=256)
    expected = len(seen) / 256
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), 255) > 1e-6
    assert len(seen) == 15 * (4 * 45 + 16)


def test_an_owner_that_demands_more_members_than_are_left_signs_nothing(tmp_path: Path) -> None:
    strict = Floors(2, 1, 1, 6, counted=False)
    lost = {(at, Stage.VECTORS): ("w6",) for at in range(5)}
    made = secure(tmp_path, floors=strict, min_clients=6, lost=lost)
    made.run()
    assert made.state.phase is Phase.FAILED
    assert "at least 6 are needed here" in made.state.reason
    assert not made.asks


def test_a_sum_that_would_show_one_member_by_difference_is_not_signed(tmp_path: Path) -> None:
    """A coordinator that has opened a round's sum asks for it again, without one member."""
    made = secure(tmp_path)
    made.begin()
    while not made.asks:
        made.step(made.queue.pop(0))
    model, order = made.state.model, next(o for _, o in made.said if isinstance(o, asked.TrainRound))
    assert model is not None
    for without, allowed in ((("w6",), False), ((), True), (("w5", "w6"), True), (("w4", "w6"), False)):
        found = _again(made, order, without, f"again-{len(without)}-{allowed}")
        assert (set(found.values()) == {""}) is allowed, (without, found)
        if not allowed:
            assert all("apart" in why or "opened already" in why for why in found.values() if why)
            assert list(found.values()).count("") <= 1  # w5 has answered once alone; a quorum never comes


def _again(
    made: SecureFederation, order: asked.TrainRound, without: tuple[str, ...], exchange: str
) -> dict[str, str]:
    """Another exchange for the same model, up to the answers; why each member refuses."""
    names = [name for name in NAMES if name not in without]
    head = ("job-1", 0, exchange)
    keys = {n: made.clients[n].secure(asked.SecureOrder(*head, Stage.KEYS)).keys for n in names}
    roster = {n: key for n, key in keys.items() if key is not None}
    parcels = {
        n: made.clients[n].secure(asked.SecureOrder(*head, Stage.SHARES, roster=roster)).parcels
        for n in names
    }
    for n in names:
        mine = {peer: parcels[peer][n] for peer in names if peer != n}
        rounds = made.clients[n]._secure
        assert rounds is not None
        sent = asked.TrainRound(
            "job-1", 0, order.model, "none", 1.0, 60.0, order.seed, exchange, (), len(names), 24 * len(names),
            exchange, tuple(names), mine,
        )  # fmt: skip
        assert made.clients[n].train(sent, _cancel()).stored is not None
    signed = {
        n: made.clients[n].secure(asked.SecureOrder(*head, Stage.SIGNATURES, survivors=tuple(names)))
        for n in names
    }
    signatures = {n: answer.signature for n, answer in signed.items() if answer.signature}
    for n in names:
        made.clients[n].secure(asked.SecureOrder(*head, Stage.ANSWERS, signatures=signatures))
    return {n: answer.refused for n, answer in signed.items()}


def _cancel() -> Any:
    from worker.cancel import Cancel

    return Cancel()


def test_orders_of_an_exchange_mean_nothing_to_a_job_without_one(tmp_path: Path) -> None:
    made = SecureFederation(tmp_path, NAMES[:2], {"local_steps": 2})
    answer = made.clients["w1"].secure(asked.SecureOrder("job-1", 0, "x", Stage.KEYS))
    assert "not secure" in answer.refused
    assert answer.keys is None


def test_a_strategy_of_ones_own_ends_with_the_bits_of_ours_under_masks(tmp_path: Path) -> None:
    tutorial()
    mine = secure(tmp_path / "mine", NAMES[:3], strategy="controls")
    ours = secure(tmp_path / "ours", NAMES[:3], strategy="scaffold")
    mine.run()
    ours.run()
    assert mine.state.phase is ours.state.phase is Phase.FINISHED, mine.state.reason
    assert same(mine.weights(), ours.weights())


@pytest.mark.parametrize("readable", [False, True])
def test_a_vector_of_nonsense_repeats_the_round_and_opens_nothing(tmp_path: Path, readable: bool) -> None:
    """A file that is none is its sender's fault; of words nobody can tell whose are wrong."""

    class Nonsense(SecureFederation):
        def trained(self, client: Any, order: asked.TrainRound) -> Any:
            update = super().trained(client, order)
            if order.round != 1 or self.state.repeats or client is not self.clients["w2"]:
                return update
            path = self.folder / "nonsense"
            draw = np.random.default_rng(1)
            words = [draw.integers(0, 2**32, 45, np.uint32), draw.integers(0, 2**63, 2, np.uint64)]
            write_masked(path, words) if readable else path.write_bytes(b"nonsense")
            return replace(update, update=self.server.store.put(path.read_bytes()))

    made = Nonsense(tmp_path, NAMES[:4], {"secure": Secure(), "local_steps": 2})
    made.begin()
    reasons = set()
    while not made.state.ended:
        made.step(made.queue.pop(0)) if made.queue else _tick(made)
        reasons.add(made.state.reason)
    assert made.state.phase is Phase.FINISHED, made.state.reason
    assert any("round 2 is repeated" in reason for reason in reasons)
    assert any("cannot be opened" in reason for reason in reasons) is readable
    assert [sorted(fact.participants) for fact in made.facts()] == [list(NAMES[:4])] * 5
