from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.microbatch import Action, Depth, Work, block_ranges, gpipe, in_turn, one_f_one_b, own_blocks


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


def test_warm_ups_come_first_and_backwards_behind_all_forwards_last() -> None:
    whole, last = Depth(3), Depth(0)
    words = " ".join(f"{a.work}{a.micro}.{a.piece}" for a in in_turn([whole, last], 4))
    head = "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1"
    assert words == f"F0.0 F1.0 F2.0 F3.0 {head} B0.0 B1.0 B2.0 B3.0"
    steady = " ".join(f"{a.work}{a.micro}.{a.piece}" for a in in_turn([Depth(1), last], 4))
    assert steady == "F0.0 F1.0 F0.1 B0.1 B0.0 F1.1 B1.1 F2.0 B1.0 F2.1 B2.1 F3.0 B2.0 F3.1 B3.1 B3.0"


@given(st.data())
def test_stages_of_several_pieces_never_wait_in_a_circle(data: st.DataObject) -> None:
    n_pieces, n_micro = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 9))
    owners = data.draw(st.lists(st.integers(0, 4), min_size=n_pieces, max_size=n_pieces))
    warmups = data.draw(st.lists(st.integers(0, n_micro + 2), min_size=n_pieces, max_size=n_pieces))
    held = data.draw(st.sampled_from([0, 1, 4]))
    depths = [Depth(warmup, held) for warmup in sorted(warmups, reverse=True)]
    mine = {owner: [at for at in range(n_pieces) if owners[at] == owner] for owner in set(owners)}
    left = {
        owner: list(reversed(in_turn([depths[at] for at in pieces], n_micro)))
        for owner, pieces in mine.items()
    }
    done: set[tuple[bool, int, int]] = set()  # forward, piece, micro-batch

    def ready(at: int, action: Action) -> bool:
        if action.work is Work.WEIGHT:
            return True
        if action.work is Work.FORWARD:
            return at == 0 or (True, at - 1, action.micro) in done
        later = (False, at + 1, action.micro) if at + 1 < n_pieces else (True, at, action.micro)
        return later in done

    while any(left.values()):
        moved = False
        for owner, actions in left.items():
            while actions and ready(at := mine[owner][actions[-1].piece], actions[-1]):
                action = actions.pop()
                if action.work is not Work.WEIGHT:
                    done.add((action.work is Work.FORWARD, at, action.micro))
                moved = True
        assert moved, "all wait"
