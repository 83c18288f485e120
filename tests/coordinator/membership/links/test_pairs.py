"""A PairMap is a dict that forgets a worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership.links.pairs import PairMap

ENDS = st.sampled_from("abcd")


@given(st.lists(st.tuples(st.sampled_from(("set", "delete", "forget")), ENDS, ENDS, st.integers())))
def test_it_is_the_dict_that_the_same_changes_make(changes: list[tuple[str, str, str, int]]):
    pairs: PairMap[int] = PairMap()
    plain: dict[tuple[str, str], int] = {}
    for what, a, b, value in changes:
        if what == "set":
            pairs[a, b] = plain[a, b] = value
        elif what == "delete":
            assert pairs.pop((a, b), None) == plain.pop((a, b), None)
        else:
            pairs.forget(a)
            plain = {pair: known for pair, known in plain.items() if a not in pair}
        assert list(pairs.items()) == list(plain.items())
        assert {pair for pair in plain if a in pair} == set(pairs.of(a))
        assert pairs.get((a, b)) == plain.get((a, b))
    assert pairs == plain
    assert len(pairs) == len(plain)
