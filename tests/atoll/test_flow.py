"""What the walk says of values holds when samples are permuted or replaced, for programs drawn at random."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from atoll.errors import UnsupportedOp
from atoll.flow.call import base_name
from atoll.flow.families import FAMILIES
from atoll.flow.value import Kind, Value
from atoll.flow.walk import Walked, walk
from atoll.opdag import LeafRef, OpRef, Source
from atoll.ops import ALLOWED, GETITEM
from atoll.ops import schema as schema_of
from atoll.schemas import HIDDEN_VIEWS
from tests.atoll.flow_programs import BATCH, Builder, grown, meta_of, violations

SEEDS, BLOCK = 320, 40


def walked(builder: Builder) -> Walked:
    inputs = {name: meta_of(tensor) for name, tensor in builder.inputs.items()}
    leaves = {leaf.name: meta_of(tensor) for leaf, tensor in builder.leaves.items()}
    (found,) = walk([builder.program()], inputs, leaves)
    return found


@pytest.mark.parametrize("block", range(0, SEEDS, BLOCK))
def test_rows_follow_their_samples_and_means_do_not_know_their_order(block: int) -> None:
    kinds: Counter[Kind] = Counter()
    for seed in range(block, block + BLOCK):
        builder = grown(seed, 25)
        try:
            found = walked(builder)
        except UnsupportedOp:
            continue
        order = list(range(BATCH))
        random.Random(seed).shuffle(order)
        try:
            wrong = violations(builder, found, order, seed)
        except (IndexError, RuntimeError, ZeroDivisionError):
            continue  # an index that fits one set of inputs need not fit another
        assert not wrong, f"seed {seed}: {wrong[0]}"
        values = [found.values[OpRef(at)] for at in range(len(builder.ops))]
        kinds.update(v.kind for v in values if isinstance(v, Value))
    assert all(kinds[kind] > 5 for kind in (Kind.CLEAN, Kind.MEAN, Kind.ROWS, Kind.RAW)), kinds


def test_every_op_of_a_family_is_on_the_allow_list() -> None:
    known = {base_name(target.split(".")[1]) for target in ALLOWED if target != GETITEM}
    assert set(FAMILIES) <= known


def test_an_op_of_no_family_makes_raw_of_samples() -> None:
    builder = grown(0, 0)
    x = builder.add("aten.select.int", LeafRef(Source.INPUT, "x"), 1, 0)
    builder.add("aten.linalg_inv.default", x)
    found = walked(builder)
    assert found.single(OpRef(0)).kind is Kind.ROWS
    assert found.single(OpRef(1)).kind is Kind.RAW


def test_ops_that_return_an_argument_are_known_to() -> None:
    """Those of one tensor that torch's schemas are silent about."""
    silent = []
    for target in sorted(ALLOWED - {GETITEM} - HIDDEN_VIEWS):
        schema = schema_of(target)
        needed = [a for a in schema.arguments if not a.has_default_value()]
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns) or len(needed) != 1:
            continue
        x = torch.ones(1, 4, 4)
        _, name, overload = target.split(".")
        try:
            out = getattr(getattr(torch.ops.aten, name), overload)(x)
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            continue
        several = out if isinstance(out, tuple | list) else (out,)
        silent += [target for each in several if _shares(each, x)]
    assert silent == []


def _shares(out: object, x: torch.Tensor) -> bool:
    return (
        isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    )
