"""What follows from inputs alone, in graphs of the kinds that people bring."""

from __future__ import annotations

from atoll.opdag import Kind, LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.raw_values import reads_inputs

OUT = TensorMeta((4,), "float32")
TOKENS, LABELS = LeafRef(Source.INPUT, "tokens"), LeafRef(Source.INPUT, "labels")
WEIGHT, BUFFER = LeafRef(Source.PARAMETER, "w"), LeafRef(Source.BUFFER, "mean")


def graph(*args: tuple[OpRef | LeafRef, ...]) -> list[tuple[int, OpNode]]:
    return [
        (at, OpNode(f"op{at}", Kind.NON_PARAMETRIC, "t", each, (), (OUT,))) for at, each in enumerate(args)
    ]


def test_a_parameter_ends_what_is_raw() -> None:
    ops = graph((WEIGHT, TOKENS), (OpRef(0), WEIGHT), (LABELS,), (OpRef(1), OpRef(2)))
    assert reads_inputs(ops) == {0: False, 2: True, 3: False}


def test_buffers_constants_and_literals_do_not() -> None:
    constant = graph((), (OpRef(0),), (TOKENS, BUFFER), (OpRef(2), OpRef(1)), (OpRef(3), WEIGHT))
    assert reads_inputs(constant) == {2: True, 3: True, 4: False}


def test_a_mask_pins_whoever_reads_it() -> None:
    ops = graph((TOKENS,), (WEIGHT, TOKENS), (OpRef(1), OpRef(0)), (OpRef(2), WEIGHT), (OpRef(3), OpRef(0)))
    assert reads_inputs(ops) == {0: True, 1: False, 2: False, 4: False}


def test_what_another_piece_sent_is_not_raw() -> None:
    ops = [(7, OpNode("op7", Kind.NON_PARAMETRIC, "t", (OpRef(3), LABELS), (), (OUT,)))]
    assert reads_inputs(ops) == {7: False}
