"""What a data set's samples have spent in all jobs, on this machine's disk, and the budget that bounds it.

    STATE/federated/samples.json    by data set and job: noise, rate, and steps that left

An update is charged before its first byte leaves. A damaged file is an error at every use: what is spent is
not known then, so nothing leaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import StorageError, UsageError
from hostos.files.file_locks import lock
from hostos.files.locked_json import sound_object
from hostos.files.private_files import private_folder, write_private
from hostos.files.refusals import disk
from strategies.privacy.samples import BUDGET_DELTA, Charge, epsilon
from worker.federated.kept.folders import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

FILE = "samples.json"
MAX_BYTES = 64 << 20
LAST, CHARGES = "last", "charges"


@dataclass(frozen=True, slots=True)
class Charged:
    """``charge`` of each of a job's ``updates``, on the data set named ``data``."""

    data: str
    charge: Charge
    updates: int


class SampleLedger:
    """The ledger of one state folder; the daemon's threads and other processes take turns."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FOLDER / FILE

    def spent(self, data: str, but: str = "") -> tuple[Charge, ...]:
        """Charges of a data set, by its name; ``but``: without this job's."""
        return _charges(self._read(), data, but)

    def charge(self, job: str, charged: Charged, update: str, budget: float) -> None:
        """Charge an update that is about to leave, by its hash; the same one again costs nothing.

        UsageError for more than the job has stated, and where it would exceed the ``budget`` (0: none),
        StorageError.
        """
        one = charged.charge
        with self._changing() as found:
            entry = found.setdefault(charged.data, {}).setdefault(job, {LAST: "", CHARGES: []})
            if entry[LAST] == update:
                return
            after = epsilon([*_charges(found, charged.data), one], BUDGET_DELTA)
            if budget and after > budget:
                raise UsageError(exceeded(after, budget, "this update"))
            held = [Charge(*each) for each in entry[CHARGES]]
            if sum(each.steps for each in held) + one.steps > charged.updates * one.steps:
                raise UsageError(
                    f"job {job} has sent the {charged.updates} updates that its privacy accounts for"
                )
            same = [each for each in held if (each.noise, each.rate) == (one.noise, one.rate)]
            steps = one.steps + sum(each.steps for each in same)
            kept = [*(each for each in held if each not in same), Charge(one.noise, one.rate, steps)]
            entry[LAST], entry[CHARGES] = update, [[each.noise, each.rate, each.steps] for each in kept]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        private_folder(self.path.parent)
        at = self.path.with_name("samples.lock")
        with disk(f"write {self.path}", "free space there"), at.open("w") as opened:
            lock(opened)
            found = self._read()
            yield found
            write_private(self.path, json.dumps(found).encode())

    def _read(self) -> dict[str, Any]:
        try:
            found = sound_object(self.path, MAX_BYTES)
            for data in found:
                _charges(found, data)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise StorageError(
                f"{self.path} is damaged ({error}), so what samples have spent is not known: nothing leaves; "
                "restore it from a backup"
            ) from None
        return found


def exceeded(after: float, budget: float, what: str) -> str:
    """Why something may not leave."""
    return (
        f"{what} would bring what its samples have spent to epsilon {after:.3g} at delta {BUDGET_DELTA:g}; "
        f"their owner allows {budget:g} (`atoll-worker data policy NAME --epsilon`)"
    )


def account_words(before: float, after: float, budget: float) -> str:
    """What a data set has spent in other jobs and would with this one, for its owner."""
    bound = f"your budget is {budget:g}" if budget else "you have set no budget"
    word = ", so it is refused" if budget and after > budget else ""
    return (
        f"epsilon {before:.3g} spent in other jobs on these data, at most {after:.3g} with all updates of "
        f"this one, at delta {BUDGET_DELTA:g}; {bound}{word}"
    )


def _charges(found: dict[str, Any], data: str, but: str = "") -> tuple[Charge, ...]:
    jobs = found.get(data, {})
    return tuple(
        Charge(float(noise), float(rate), int(steps))
        for job, entry in jobs.items()
        if job != but
        for noise, rate, steps in entry[CHARGES]
    )
