"""A worker's part in the secure rounds of one job: an exchange at a time, whose secrets are in memory alone.

A round that is repeated trains the same model on the same data, so the difference of two sums of it would be
the update of whoever is in one of them alone. For which members' sums this machine has answered is on disk by
model: it signs no other set that differs from one of those by fewer members than its owner demands in a sum,
and at most two.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from atoll.errors import BadFrame, StorageError
from atoll.messages.from_worker import SecureAnswer
from atoll.secure import Stage
from compressors.model_file import write_masked
from hostos.private_files import write_private
from strategies.secure.member import Member

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.messages.to_worker import SecureOrder, TrainRound
    from atoll.secure import Secure
    from compressors.container import Stored
    from strategies.fixed import FixedSums
    from strategies.secure.vector import Encoding

ANSWERED = "answered.json"
MAX_ANSWERED = 2  # sums of one model
MAX_MODELS = 1024  # that are remembered
MAX_BYTES = 64 << 20


class SecureRounds:
    """``least``: members that this machine's owner demands in every sum; ``folder``: of the job."""

    def __init__(self, who: str, job: str, secure: Secure, least: int, folder: Path) -> None:
        self._who, self._job, self._secure, self._least = who, job, secure, least
        self._path = folder / ANSWERED
        self._member: Member | None = None
        self._model = ""  # that the exchange's vector was trained from
        self._survivors: tuple[str, ...] = ()

    def answer(self, order: SecureOrder) -> SecureAnswer:
        """This member's answer. BadFrame for what it must not answer, StorageError."""
        head = (order.job, order.round, order.exchange, order.stage)
        if order.stage is Stage.KEYS and (self._member is None or self._member.exchange != order.exchange):
            self._model, self._survivors = "", ()
            self._member = Member(
                self._who, self._job, order.round, order.exchange, self._secure, self._least
            )
        member = self._of(order.exchange)
        match order.stage:
            case Stage.KEYS:
                return SecureAnswer(*head, keys=member.keys)
            case Stage.SHARES:
                return SecureAnswer(*head, parcels=member.shares(order.roster))
            case Stage.SIGNATURES:
                self._check(order.survivors)
                signature = member.sign(order.survivors)
                self._survivors = order.survivors
                return SecureAnswer(*head, signature=signature)
            case Stage.ANSWERS:
                shares = member.unmask(order.signatures)
                self._note()  # before anybody can open the sum
                return SecureAnswer(*head, shares=shares)
        raise BadFrame(f"secure aggregation: a member is not asked for {order.stage}")

    def begin(self, order: TrainRound) -> None:
        """Take the neighbours' shares, before anything is trained for a round that cannot be masked."""
        self._of(order.exchange).receive(order.shared, order.parcels)
        self._model = order.model.full.hash

    def write(self, path: Path, order: TrainRound, sums: FixedSums, encoding: Encoding) -> Stored:
        """The file of the masked vector. BadUpdate for sums that have no room in it."""
        words = encoding.words(sums)
        self._of(order.exchange).mask(words)
        return write_masked(path, words)

    def _of(self, exchange: str) -> Member:
        if self._member is None or self._member.exchange != exchange:
            raise BadFrame(
                "secure aggregation: this member has no keys of that exchange, as they end with its process; "
                "the round must begin anew"
            )
        return self._member

    # ------------------------------------------------------------ what was answered before

    def _check(self, survivors: tuple[str, ...]) -> None:
        """Raise BadFrame where the difference to another sum of the same model would be over too few."""
        wanted = frozenset(survivors)
        before = [frozenset(each) for each in self._answered().get(self._model, [])]
        if wanted in before:
            return
        if len(before) >= MAX_ANSWERED:
            raise BadFrame(f"secure aggregation: {len(before)} sums of this model were opened already")
        for other in before:
            for apart in (wanted - other, other - wanted):
                if 0 < len(apart) < self._least:
                    raise BadFrame(
                        f"secure aggregation: with the sum of this model that was opened before, {len(apart)}"
                        f" members would be seen apart; at least {self._least} are demanded here"
                    )

    def _note(self) -> None:
        answered = self._answered()
        found = answered.pop(self._model, [])
        if sorted(self._survivors) not in found:
            found.append(sorted(self._survivors))
        kept = dict(list(answered.items())[-MAX_MODELS + 1 :])
        write_private(self._path, json.dumps({**kept, self._model: found}).encode())

    def _answered(self) -> dict[str, list[list[str]]]:
        """Survivors by model. StorageError for a damaged file: what is not known may not be answered."""
        try:
            if self._path.stat().st_size > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            found = json.loads(self._path.read_text())
            return {str(model): [list(map(str, each)) for each in sets] for model, sets in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise StorageError(
                f"{self._path} is damaged ({error}), and two sums could show one member's update; remove it "
                "once no secure job runs here"
            ) from None
