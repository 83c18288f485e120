from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.microbatch import Action, Work, block_ranges, gpipe, one_f_one_b, own_blocks


@given(n_micro=st.integers(1, 20), warmup=st.integers(0, 25), held=st.integers(0, 25))
def test_every_list_does_all_the_work_once_in_order_and_holds_no_more_than_it_may(n_micro, warmup, held):
    actions = one_f_one_b(n_micro, warmup, held)
    kinds = (Work.FORWARD, Work.INPUT, Work.WEIGHT) if held else (Work.FORWARD, Work.BACKWARD)
    for work in Work:
        micros = [action.micro for action in actions if action.work is work]
        assert micros == (list(range(n_micro)) if work in kinds else [])
    at = {action: i for i, action in enumerate(actions)}
    for micro in range(n_micro):
        order = [at[Action(work, micro)] for work in kinds]
        assert all(a < b for a, b in pairwise(order))
    alive = most = 0
    for action in actions:
        alive += {Work.FORWARD: 1, kinds[-1]: -1}.get(action.work, 0)
        most = max(most, alive)
    assert most <= max(min(warmup, n_micro - 1) + 1, min(held, n_micro))


def test_weight_gradients_come_as_late_as_may_be():
    wanted = "F0 F1 I0 F2 I1 W0 F3 I2 I3 W1 W2 W3"
    assert " ".join(f"{a.work}{a.micro}" for a in one_f_one_b(4, 1, 3)) == wanted
    assert " ".join(f"{a.work}{a.micro}" for a in one_f_one_b(2, 0, 9)) == "F0 I0 F1 I1 W0 W1"


def test_gpipe_forwards_all_first():
    assert [a.work for a in gpipe(2)] == [Work.FORWARD, Work.FORWARD, Work.BACKWARD, Work.BACKWARD]


def test_a_step_without_micro_batches_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        one_f_one_b(0, 1)


def test_blocks_share_out_the_micro_batches_in_order() -> None:
    assert block_ranges(8, 1) == (range(8),)
    assert block_ranges(7, 3) == (range(2), range(2, 4), range(4, 7))
    for blocks in (0, 8):
        with pytest.raises(UsageError, match=f"{blocks} blocks of 7"):
            block_ranges(7, blocks)


def test_a_replicas_blocks_are_whole() -> None:
    assert own_blocks(7, 3, (0, 7)) == dict(enumerate(block_ranges(7, 3)))
    assert own_blocks(7, 3, (2, 7)) == {1: range(2, 4), 2: range(4, 7)}
    for micros in ((0, 3), (1, 4), (3, 3)):
        with pytest.raises(UsageError, match="no whole blocks"):
            own_blocks(7, 3, micros)
