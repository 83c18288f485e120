"""Secure sums equal plain ones whoever is lost when; what the coordinator holds is uniform, liars fail."""

from __future__ import annotations

import random

import numpy as np
import pytest

from atoll.errors import BadFrame, BadUpdate, UsageError
from atoll.secure import Secure
from strategies.secure.exchange import Exchange, degree, quorum
from strategies.secure.keys import own_key
from strategies.secure.masks import add_mask
from strategies.secure.member import Member
from strategies.secure.opening import closed_for
from strategies.secure.sharing import PRIME, joined, shared
from tests.strategies.secure.exchanges import STAGES, Run, names, plain, vectors


def _equal(found: object, wanted: object) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[call-overload]


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [3, 4, 5, 7, 12, 20])
def test_sum_is_the_plain_one_with_a_third_lost_at_any_stage(n: int, stage: str) -> None:
    rng = random.Random(f"{n}/{stage}")
    given = vectors(n, seed=n)
    # Whoever gives no key is no member: a third of those who are left may be lost afterwards.
    run = Run(
        given, lost={stage: rng.sample(sorted(given), n // 3 if stage != "keys" else min(n // 3, n - 3))}
    )
    assert _equal(run.run(), plain(given, run.survivors))
    assert run.survivors == set(run.there("vectors"))


@pytest.mark.parametrize("seed", range(12))
def test_sum_is_the_plain_one_with_a_third_lost_over_all_stages(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 20)
    given = vectors(n, size=33, dtype=rng.choice([np.uint32, np.uint64]), seed=seed)
    lost: dict[str, list[str]] = {}
    for who in rng.sample(sorted(given), rng.randint(0, n // 3)):
        lost.setdefault(rng.choice(STAGES[1:]), []).append(who)
    run = Run(given, Secure(neighbours=rng.choice([0, 0, 20])), lost)
    assert _equal(run.run(), plain(given, run.survivors)), (n, lost)


@pytest.mark.parametrize("n", [50, 100])
def test_a_hundred_members_with_neighbours_alone_lose_a_third(n: int) -> None:
    rng = random.Random(n)
    given, gone = vectors(n, size=16), rng.sample(names(n), n // 3)
    lost = {stage: gone[at::4] for at, stage in enumerate(STAGES[1:])}
    run = Run(given, Secure(neighbours=n * 7 // 10 // 2 * 2), lost)
    assert _equal(run.run(), plain(given, run.survivors))
    assert run.of.degree == n * 7 // 10 // 2 * 2 < n - 1


def test_one_member_too_few_and_the_sum_stays_closed() -> None:
    for n in (3, 5, 9, 14):
        run = Run(vectors(n), lost={"answers": names(n)[: n - quorum(n, 0.66) + 1]})
        run.share()
        run.upload()
        run.answer()
        assert "are needed" in closed_for(run.of, run.shared, run.shares)
        with pytest.raises(AssertionError):
            run.opened()


def test_a_quorum_is_more_than_half_and_survives_the_loss_of_a_third() -> None:
    for n in range(3, 400):
        assert n // 2 < quorum(n, 0.66) <= n - n // 3
    assert quorum(50, 0.66) == 33


def test_helpers_of_a_liar_cannot_have_two_lists_signed_up_to_the_stated_number() -> None:
    """Each honest member signs one list, each helper both; one helper more than stated and both may have a
    quorum."""
    for n in range(3, 200):
        least = quorum(n, 0.66)
        helpers = 2 * least - n - 1
        assert 2 * (least - helpers) > n - helpers
        assert 2 * (least - helpers - 1) <= n - helpers - 1
    assert [2 * quorum(n, 0.66) - n - 1 for n in (3, 6, 20, 100)] == [0, 1, 7, 31]


def test_neighbours_suffice_for_a_random_third_that_is_lost() -> None:
    """Holders of a share are drawn like balls: hypergeometric, summed over members."""
    from scipy.stats import hypergeom

    for n in (114, 256, 512, 1024, 4096):
        holders = degree(n, 0) + 1
        few = hypergeom(n, n - n // 3, holders).cdf(holders // 2)
        assert n * few < 2.1e-3, n


# ---------------------------------------------------------------- what the coordinator holds


def _chi_square(data: bytes) -> float:
    from scipy.stats import chi2

    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 255))


def test_masked_words_are_uniform_whatever_they_hide() -> None:
    """A million words of zeros, and their difference between two exchanges; every byte of a word."""
    zeros = {who: [np.zeros(1_000_000, np.uint32), np.zeros(1, np.uint64)] for who in names(3)}
    run = Run(zeros)
    run.share()
    run.upload()
    again = Run(zeros, name="exchange-2")
    again.share()
    again.upload()
    for who in names(3):
        words, later = run.masked[who][0], again.masked[who][0]
        for array in (words, words - later):
            for byte in range(4):
                held = np.ascontiguousarray(array.view(np.uint8)[byte::4])
                assert _chi_square(held.tobytes()) > 1e-6, (who, byte)
    # A pair's vectors together, their common mask cancelled, still have each its own mask.
    both = run.masked["w000"][0] + run.masked["w001"][0]
    assert _chi_square(both.tobytes()) > 1e-6
    # Negative control: without any mask, and with the mask of a key that is known.
    assert _chi_square(zeros["w000"][0].tobytes()) < 1e-6
    known = [np.zeros(1000, np.uint32)]
    add_mask(known, bytes(32))
    add_mask(known, bytes(32), subtract=True)
    assert not known[0].any()


def test_fewer_shares_than_the_threshold_say_nothing_of_a_secret() -> None:
    """Over a small field's worth of secrets: t - 1 shares fit every other secret as well."""
    secret = bytes(range(32))
    held = shared(secret, range(1, 8), 4, random.Random(5).randbytes)
    assert joined(dict(list(held.items())[2:6]), 4) == secret
    with pytest.raises(BadUpdate, match="are needed"):
        joined(dict(list(held.items())[:3]), 4)
    for guess in (0, 1, 2**255):
        # The polynomial through three shares and any guess exists: give the fourth share it implies.
        points = {0: guess, **{x: int.from_bytes(held[x], "big") for x in (1, 2, 3)}}
        fourth = 0
        for x, y in points.items():
            term = y
            for other in points:
                if other != x:
                    term = term * (4 - other) * pow(x - other, -1, PRIME) % PRIME
            fourth = (fourth + term) % PRIME
        forged = {**{x: held[x] for x in (1, 2, 3)}, 4: fourth.to_bytes(66, "big")}
        assert joined(forged, 4) == guess.to_bytes(32, "big")


def test_parcels_hold_nothing_that_is_not_sealed() -> None:
    run = Run(vectors(4))
    run.share()
    secrets = [m._pairs.mask_secret.hex() for m in run.members.values()]
    secrets += [m._own_secret.hex() for m in run.members.values()]
    secrets += [half.hex() for m in run.members.values() for pair in m._held.values() for half in pair]
    seen = "".join(parcel for held in run.parcels.values() for parcel in held.values())
    assert not [secret for secret in secrets if secret in seen]
    other = Run(vectors(4), name="exchange-2")
    roster = {who: member.keys for who, member in other.members.items()}
    parcels = {who: other.members[who].shares(roster) for who in names(4)}
    swapped = {"w001": parcels["w001"]["w002"], **{w: parcels[w]["w000"] for w in ("w002", "w003")}}
    with pytest.raises(BadFrame, match="did not seal"):  # sealed for somebody else
        other.members["w000"].receive(names(4), swapped)


# ---------------------------------------------------------------- liars


def _uploaded(n: int, secure: Secure | None = None) -> Run:
    run = Run(vectors(n), secure or Secure())
    run.share()
    run.upload()
    return run


def test_no_member_ever_gives_both_shares_of_a_peer() -> None:
    """A coordinator that says of w002 to some that it was lost, to others that it is there."""
    run = _uploaded(6)
    whole, less = frozenset(names(6)), frozenset(names(6)) - {"w002"}
    told = {who: less if who in ("w000", "w001", "w003") else whole for who in names(6)}
    signatures = {who: run.members[who].sign(told[who]) for who in names(6)}
    for who, member in run.members.items():
        with pytest.raises(BadFrame, match="members signed the survivors"):
            member.unmask(signatures)
        other = whole if told[who] is less else less
        if who in other:
            with pytest.raises(BadFrame, match="two lists of survivors"):
                member.sign(other)
    assert "are needed" in closed_for(run.of, run.shared, run.shares)


def test_one_answer_a_round_of_one_kind_for_each_peer() -> None:
    run = _uploaded(5)
    lost = frozenset(names(5)) - {"w004"}  # a lie: its vector came
    signatures = {who: run.members[who].sign(lost) for who in sorted(lost)}
    answers = {who: run.members[who].unmask(signatures) for who in sorted(lost)}
    for who, answer in answers.items():
        held = run.members[who]._held
        for peer, share in answer.items():
            own, mask = held[peer]
            assert share == (mask if peer == "w004" else own).hex()
        assert run.members[who].unmask({}) == answer  # the same bytes, whatever is asked
    # The vector that was declared lost stays under its own mask: nobody gave a share of that.
    bare = [array.copy() for array in run.masked["w004"]]
    for peer in sorted(run.of.neighbours("w004")):
        key = run.members["w004"]._pairs.mask_key(run.of.roster[peer], run.of.digest)
        add_mask(bare, key, subtract=peer > "w004")
    assert not _equal(bare, run.vectors["w004"])
    add_mask(bare, own_key(run.members["w004"]._own_secret, run.of.digest), subtract=True)
    assert _equal(bare, run.vectors["w004"])


def test_survivors_that_fall_apart_are_refused() -> None:
    """With few neighbours a liar declares all of a victim's lost, and its vector would be alone."""
    run = _uploaded(20, Secure(neighbours=4, threshold=0.6))
    victim = run.of._ring[0]
    cut = frozenset(names(20)) - run.of.neighbours(victim)
    assert run.of.parts(cut) == 2
    for who in sorted(cut):
        with pytest.raises(BadFrame, match="fall apart"):
            run.members[who].sign(cut)


def test_forged_and_borrowed_signatures_count_for_nothing() -> None:
    run = _uploaded(4)
    signatures = {who: run.members[who].sign(names(4)) for who in names(4)}
    one = signatures["w001"]
    with pytest.raises(BadFrame, match="1 members signed"):
        run.members["w000"].unmask({"w001": one, "w002": one, "w003": "00" * 64, "w009": one})
    assert run.members["w000"].unmask(signatures)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("replayed", "other keys than this member's"),
        ("without", "other keys than this member's"),
        ("two", "3 are needed"),
        ("twin", "the same key"),
    ],
)
def test_rosters_that_are_replayed_or_forged_are_refused(change: str, why: str) -> None:
    old = {who: Member(who, "job-1", 3, "exchange-1", Secure()).keys for who in names(4)}
    member = Member("w000", "job-1", 3, "exchange-2", Secure())
    roster = {**old, "w000": member.keys}
    if change == "replayed":
        roster = old
    elif change == "without":
        del roster["w000"]
    elif change == "two":
        roster = {who: roster[who] for who in ("w000", "w001")}
    else:
        roster["w003"] = roster["w002"]
    with pytest.raises(BadFrame, match=why):
        member.shares(roster)


def test_a_second_roster_list_or_vector_is_refused_and_the_same_again_is_answered_alike() -> None:
    run = _uploaded(4)
    member, roster = run.members["w000"], dict(run.of.roster)
    assert member.shares(roster) == run.parcels["w000"]
    with pytest.raises(BadFrame, match="second roster"):
        member.shares({**roster, "w009": Member("w009", "job-1", 3, "x", Secure()).keys})
    with pytest.raises(BadFrame, match="two lists of members"):
        member.receive(run.shared - {"w003"}, {})
    again = [array.copy() for array in run.vectors["w000"]]
    member.mask(again)
    assert _equal(again, run.masked["w000"])
    with pytest.raises(BadFrame, match="second vector"):
        member.mask([array + 1 for array in run.vectors["w000"]])


def test_an_owner_that_demands_more_members_answers_to_no_fewer() -> None:
    strict = Member("w000", "job-1", 3, "e", Secure(), least=6)
    roster = {"w000": strict.keys, **{w: Member(w, "job-1", 3, "e", Secure()).keys for w in names(5)[1:]}}
    with pytest.raises(BadFrame, match="at least 6"):
        strict.shares(roster)


def test_wrong_shares_are_noticed_where_a_member_was_lost() -> None:
    run = Run(vectors(6), lost={"vectors": ["w005"]})
    run.run()
    run.shares["w001"]["w005"] = run.shares["w001"]["w004"]
    with pytest.raises(BadUpdate, match=r"no secret|another secret"):
        run.opened()


def test_digests_bind_every_part_of_an_exchange() -> None:
    run = Run(vectors(3))
    run.share()
    of, other = run.of, Member("w001", "job-1", 3, "e", Secure()).keys
    changed = [
        Exchange("job-2", 3, of.name, of.secure, of.roster),
        Exchange("job-1", 4, of.name, of.secure, of.roster),
        Exchange("job-1", 3, "exchange-2", of.secure, of.roster),
        Exchange("job-1", 3, of.name, Secure(threshold=0.9), of.roster),
        Exchange("job-1", 3, of.name, of.secure, {**of.roster, "w001": other}),
    ]
    assert len({of.digest, *(each.digest for each in changed)}) == 6


@pytest.mark.parametrize(
    "wrong", [{"threshold": 0.5}, {"threshold": 1.1}, {"neighbours": 3}, {"neighbours": 2}, {"bits": 7}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="Secure"):
        Secure(**wrong)  # type: ignore[arg-type]
