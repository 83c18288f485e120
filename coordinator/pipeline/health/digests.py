"""Digests of steps: which step is to be checked, who agrees on it, and who of three is wrong. Pure.

On machines of one ``DeviceClass`` a step that is repeated from the same state and the same messages has the
same bits. Its digest, of each rank in hex, is that of the gradients followed by that of the messages they
were computed from. Who says that it was sent other messages is no liar yet: what a neighbour sends again need
not be what it sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

GRADIENTS = 16  # hex digits


def drawn(secret: str, step: int, share: float, ranks: int) -> int | None:
    """Return the rank that is to be checked after ``step``, None for no check then.

    One step is drawn of each 1 / ``share`` in a row, and each rank once in ``ranks`` draws: who computes
    wrong from some step on is checked within 2 * ranks / share steps. Without the ``secret`` nobody knows
    when.
    """
    if share <= 0.0 or ranks <= 0:
        return None
    period = max(1, round(1.0 / share))
    block, at = divmod(step, period)
    if at != _number(secret, "step", block) % period:
        return None
    cycle, turn = divmod(block, ranks)
    return sorted(range(ranks), key=lambda rank: _number(secret, "rank", cycle, rank))[turn]


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which two do not agree; ``inputs``: they were not sent the same either, or say so."""

    step: int
    inputs: bool


def compare(said: Sequence[str | None], repeated: Sequence[str | None], first_step: int) -> Difference | None:
    """Return where ``repeated`` first departs from what was ``said`` of the steps from ``first_step`` on.

    None where both agree. A step of which either has None is not compared; who says nothing of what it
    computed ("") does not agree with who does. What one of them lacks at the end differs.
    """
    for at in range(max(len(said), len(repeated))):
        one = said[at] if at < len(said) else ""
        other = repeated[at] if at < len(repeated) else ""
        if one is not None and other is not None and one != other:
            return Difference(first_step + at, one[GRADIENTS:] != other[GRADIENTS:])
    return None


class Verdict(StrEnum):
    """What two who have repeated the same steps show of who computed them."""

    HOLDER = "holder"  # both depart from it in the same way: it computed wrong
    FIRST = "first"  # the second agrees with the holder: the first one repeated wrong
    OPEN = "open"  # all three differ, or a neighbour may have sent again what it had not sent


def judge(
    said: Sequence[str | None], first: Sequence[str], second: Sequence[str], first_step: int
) -> tuple[Verdict, Difference]:
    """Return who of three is wrong, where the ``first`` who repeated steps departs from what was ``said``.

    Nobody is wrong on the word of one, nor where the messages are in dispute.
    """
    difference = compare(said, first, first_step)
    if difference is None:
        raise ValueError("who agrees is not judged")
    if difference.inputs:
        return Verdict.OPEN, difference
    theirs = compare(said, second, first_step)
    if theirs is None:
        return Verdict.FIRST, difference
    at = difference.step - first_step
    same = theirs == difference and list(second[: at + 1]) == list(first[: at + 1])
    return (Verdict.HOLDER if same else Verdict.OPEN), difference
