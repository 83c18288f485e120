"""Words from elsewhere cannot move a cursor, forge a line or fill a disk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hostos.budget import Budget
from protos.text_limits import clean, plain


@given(st.text(max_size=300), st.integers(0, 200), st.booleans())
def test_cleaned_text_is_plain_and_bounded(text: str, most: int, lines: bool) -> None:
    found = clean(text, most, lines=lines)
    assert len(found) == min(most, len(text))
    assert all(plain(line) for line in (found.split("\n") if lines else [found]))
    assert clean(found, most, lines=lines) == found
    if plain(text):
        assert found == text[:most]


def test_what_people_write_stays_and_what_terminals_obey_goes() -> None:
    assert plain("Genauigkeit (μ ± σ) 精度 🎯")
    for odd in (*"\x1b\n\r\b\x7f\x9b\u2028\u2029\u200f\u202e\u2066\u061c\ufeff\U000e0041", "\ud800"):
        assert not plain(f"a{odd}b")
        assert clean(f"a{odd}b", 9) == "a b"
    assert clean("a\nb\tc\r", 9, lines=True) == "a\nb c "


@given(st.lists(st.tuples(st.floats(-1.0, 10.0), st.floats(0.0, 60.0)), max_size=100))
def test_a_budget_never_gives_more_than_its_burst_and_its_rate(asked: list[tuple[float, float]]) -> None:
    budget, now_s, latest_s, spent, refused = Budget(50.0, 3.0), 0.0, 0.0, 0.0, 0
    for pause_s, cost in asked:
        now_s += pause_s
        latest_s = max(latest_s, now_s)
        if budget.take(now_s, cost):
            spent += cost
        else:
            refused += 1
        assert spent <= 50.0 + 3.0 * latest_s + 1e-6
    assert budget.refused() == refused
    assert budget.refused() == 0


def test_a_budget_recovers() -> None:
    budget = Budget(2.0, 1.0)
    assert [budget.take(5.0) for _ in range(3)] == [True, True, False]
    assert [budget.take(6.0), budget.take(6.0)] == [True, False]
    assert [budget.take(60.0) for _ in range(3)] == [True, True, False]
