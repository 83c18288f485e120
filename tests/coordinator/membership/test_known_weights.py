"""Claims of workers: what was said last counts, within a bound for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership import known_weights
from coordinator.membership.known_weights import KnownWeights, names_of

if TYPE_CHECKING:
    import pytest

WORKERS = st.sampled_from("abc")
HASHES = st.sets(st.integers(0, 5), max_size=4).map(
    lambda found: b"".join(bytes([n]) * 32 for n in sorted(found))
)


@given(st.lists(st.tuples(WORKERS, st.one_of(st.none(), st.just("bar"), HASHES)), max_size=30))
def test_what_each_worker_said_last_counts_until_it_is_gone_or_barred(
    said: list[tuple[str, bytes | str | None]],
) -> None:
    weights, model, barred = KnownWeights(), dict[str, bytes](), set[str]()
    for worker, what in said:
        model.pop(worker, None)
        if what is None:
            weights.gone(worker)
        elif isinstance(what, str):
            weights.bar(worker)
            barred.add(worker)
        else:
            left_out = weights.said(worker, what)
            assert bool(left_out) == bool(what and worker in barred)
            if what and not left_out:
                model[worker] = what
        assert weights.claims() == model
        assert weights._bytes == sum(map(len, set(model.values())))


def test_machines_with_the_same_checkpoints_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_weights, "MAX_CLAIMED_BYTES", 64)
    weights = KnownWeights()
    assert not any(weights.said(f"w{n}", b"a" * 32 + b"b" * 32) for n in range(100))
    assert "different blobs already" in weights.said("other", b"c" * 32)
    assert weights.said("w0", b"c" * 32), "the others still hold them"
    assert list(names_of(b"a" * 32 + b"b" * 32)) == ["61" * 32, "62" * 32]
