"""A worker's part in the secure rounds of one job: an exchange at a time, whose secrets are in memory alone.

Of a private job a member sends as many vectors as the job has rounds, those of repeated rounds with them:
each may be summed by whoever can lie about it, and so many are accounted for. Their count is on disk, too.

A round that is repeated trains the same model on the same data, so the difference of two sums of it would be
the update of whoever is in one of them alone. For which members' sums this machine has answered is on disk by
model: it signs no other set that differs from one of those by fewer members than its owner demands in a sum,
and at most two.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from atoll.errors import BadFrame, StorageError
from atoll.messages.from_worker import SecureAnswer
from atoll.secure import Stage
from compressors.model_file import write_masked
from hostos.files.locked_json import sound_object
from hostos.files.private_files import write_private
from strategies.secure.member import Member

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.messages.to_worker import SecureOrder, TrainRound
    from atoll.secure import Secure
    from compressors.container import Stored
    from strategies.fixed import FixedSums
    from strategies.linear import Linear
    from strategies.secure.vector import Encoding

ANSWERED = "answered.json"
SENT = "noised.json"
MAX_ANSWERED = 2  # sums of one model
MAX_MODELS = 1024  # that are remembered
MAX_BYTES = 64 << 20


class SecureRounds:
    """``least``: members that this machine's owner demands in every sum; ``folder``: of the job; ``vectors``:
    as many are sent of a private job, of another one any number (0)."""

    def __init__(
        self, who: str, job: str, secure: Secure, least: int, folder: Path, vectors: int = 0
    ) -> None:
        self._who, self._job, self._secure, self._least = who, job, secure, least
        self._vectors, self._sent = vectors, folder / SENT
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
        if self._vectors:
            self._spend(order.exchange)

    def hidden(self, sums: FixedSums, core: Linear) -> FixedSums:
        """The member's sums as ``core`` lets them leave; raises as ``answer``."""
        assert self._member is not None  # noqa: S101 - begun
        return core.hidden(sums, self._member.quorum, self._member.noise_source())

    def write(self, path: Path, order: TrainRound, sums: FixedSums, encoding: Encoding) -> Stored:
        """The file of the masked vector. BadUpdate for sums that have no room in it."""
        words = encoding.words(sums)
        self._of(order.exchange).mask(words)
        return write_masked(path, words)

    def _of(self, exchange: str) -> Member:
        if self._member is None or self._member.exchange != exchange:
            raise BadFrame(
                "secure aggregation: this member has no keys of that exchange, as they end with its process; "
                "the round must start again"
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

    def _spend(self, exchange: str) -> None:
        """Count a vector before it is made. BadFrame for one too many, StorageError where none was counted
        that should have been."""
        sent = _read(self._sent)
        count, last = int(sent.get("count", 0)), sent.get("last", "")
        if last == exchange:
            return
        if count >= self._vectors:
            raise BadFrame(
                f"secure aggregation: {count} noised updates were sent, all that this job's privacy accounts "
                "for, those of repeated rounds with them"
            )
        write_private(self._sent, json.dumps({"count": count + 1, "last": exchange}).encode())

    def _note(self) -> None:
        answered = self._answered()
        found = answered.pop(self._model, [])
        if sorted(self._survivors) not in found:
            found.append(sorted(self._survivors))
        kept = dict(list(answered.items())[-MAX_MODELS + 1 :])
        write_private(self._path, json.dumps({**kept, self._model: found}).encode())

    def _answered(self) -> dict[str, list[list[str]]]:
        """Survivors by model; raises as ``_read``."""
        found = _read(self._path).items()
        return {str(model): [list(map(str, each)) for each in sets] for model, sets in found}


def _read(path: Path) -> dict[str, Any]:
    """What this machine has noted. StorageError for a damaged file: what is not known may not be answered."""
    try:
        return sound_object(path, MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} is damaged ({error}), and without it one member's update could show; remove it once no "
            "secure job runs here"
        ) from None
