"""Messages of a round survive their way in pieces, and whatever else arrives is a fault of its sender."""

from __future__ import annotations

import pytest
import torch

from atoll.collective import TOTAL
from atoll.errors import BadFrame
from atoll.exchange import Exchange, ExchangeRound, Pattern
from strategies.exchanges import make_rule
from strategies.exchanges.base import Contribution, Flat
from worker.exchange import carrier
from worker.exchange.carrier import Arriving, Slot, arriving, most_bytes, packed, pieces_of, split, unpacked
from worker.exchange.round import CollectiveRun, Message
from worker.exchange.schedule import collective_of

RANKS = (0, 1, 2)
AT = ExchangeRound(3, RANKS, seed=5)


def round_of(exchange: Exchange, size: int = 60) -> tuple[dict[int, CollectiveRun], Contribution]:
    rule = make_rule(exchange)
    models = {rank: torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in RANKS}
    state = rule.init(Flat(((size,),)), torch.zeros(size))
    brought = {rank: rule.contribute(models[rank], state, AT, rank) for rank in RANKS}
    pattern = Pattern.GATHERED if exchange.rule == "sparseloco" else Pattern.OWNERS
    collective = collective_of(pattern, [RANKS], brought[0])
    return {
        rank: CollectiveRun(rule, collective, rank, AT, {rank: brought[rank]}) for rank in RANKS
    }, brought[0]


def over_the_wire(message: Message, run: CollectiveRun, settings: Contribution) -> Message:
    slot = Slot(message.segment, message.label)
    (one,) = [a for a in arriving(run._collective, run.rank, settings) if a.slot == slot]
    most = most_bytes(run._collective, slot, settings)
    for size, piece in zip(one.sizes, split(packed(message), most), strict=True):
        assert len(piece) <= size
        one.pieces.append(piece.clone())
    assert one.whole
    return unpacked(one, AT, message.phase, run.rank)


@pytest.mark.parametrize("rule", ["diloco", "diloco:int8_block", "diloco:int4_block", "sparseloco"])
def test_messages_arrive_as_they_were_sent(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "PIECE_BYTES", 64)
    name, _, codec = rule.partition(":")
    runs, settings = round_of(Exchange(name, codec=codec or "none", ratio=20.0 if not codec else 1.0))
    waiting = [message for run in runs.values() for message in run.start()]
    while waiting:
        message = waiting.pop(0)
        found = over_the_wire(message, runs[message.target], settings)
        assert found.packet.header == message.packet.header
        assert bytes(found.packet.payload) == bytes(message.packet.payload)
        waiting += runs[message.target].receive(found)
    receipts = [run.receipt() for run in runs.values()]
    assert all(receipt.complete for receipt in receipts)
    assert len({receipt.digest for receipt in receipts}) == 1


def test_parts_are_waited_for_before_totals() -> None:
    runs, settings = round_of(Exchange("diloco"))
    labels = [one.slot.label == TOTAL for one in arriving(runs[1]._collective, 1, settings)]
    assert labels == sorted(labels)
    assert True in labels
    assert False in labels


def test_no_two_pieces_of_a_round_share_a_key() -> None:
    runs, settings = round_of(Exchange("diloco"))
    keys = [
        one.slot.key(piece)
        for one in arriving(runs[0]._collective, 0, settings)
        for piece in range(len(pieces_of(3 * carrier.PIECE_BYTES + 1)))
    ]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("frame", [b"", b"\xff" * 19, b"\xff" * 64, b"\x00" * 20])
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    one = Arriving(
        Slot(0, 1), 1, [len(frame)], [torch.frombuffer(bytearray(frame or b"x"), dtype=torch.uint8)]
    )
    with pytest.raises(BadFrame):
        unpacked(one, AT, 0, 0)


def test_a_damaged_part_is_refused_by_the_round() -> None:
    runs, _settings = round_of(Exchange("diloco"))
    message = runs[1].start()[0]
    frame = packed(message)
    frame[-1] ^= 1
    one = Arriving(Slot(message.segment, message.label), 1, [len(frame)], [frame])
    with pytest.raises(BadFrame, match="digest"):
        runs[message.target].receive(unpacked(one, AT, 0, message.target))
