"""Who gets which workers now: jobs, owners and a fleet in, an ``Allotment`` out. Pure.

    claims + machines ─► order (policies) ─► sizes: the least for each, the rest by heSRPT's shares
                      ─► begins | grows | gives workers at its next commit | waits, and why

Shares: of n jobs in their order the i-th last has ((i / n)^2 - ((i - 1) / n)^2) of the fleet: of two jobs 3/4
and 1/4. That minimises the mean time for speed k^0.5 (heSRPT, Berg, Vesilo, Harchol-Balter 2020). For k^0.8
it was within 7 % of the best, and better than giving each worker where it saves most, or than evolving whole
schedules as ONES does (decision 091).

A job that runs gives workers only where the one that waits gains WORTH times what giving costs, or is of a
higher priority.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from coordinator.sharing.claims import NO_QUOTA, Allotment, Claim, Gives, Machine, Quota, Waiting, faster
from coordinator.sharing.forecast import predicted_starts
from coordinator.sharing.places import Placing, fewest_places, least_work_first
from coordinator.sharing.policies import RANK, Policy, ordered, urgent

WORTH = 1.5  # seconds that a change saves, over those that it takes
UNKNOWN_WORK_S = 3600.0  # of a job of which nobody knows how long it takes
SHARED = 2.0  # exponent of shares: 1 / (1 - p) for speed k^p


def allot(
    claims: Sequence[Claim],
    machines: Sequence[Machine],
    policy: Policy,
    now_s: float,
    quotas: Mapping[str, Quota] | None = None,
    placing: Placing = least_work_first,
) -> Allotment:
    """Return what is to change. ``machines``: all that jobs may use, held ones too; a job never gets a worker
    that another holds, it begins once that was given back."""
    return _Round(policy, now_s, quotas or {}, placing, claims, machines).allotment()


def sizes(
    claims: Sequence[Claim], machines: Sequence[Machine], policy: Policy, now_s: float
) -> dict[str, int]:
    """Return by job how many workers it would have if nothing were held yet and moving cost nothing."""
    return _Round(policy, now_s, {}, least_work_first, claims, machines).sizes()


@dataclass(slots=True)
class _Round:
    """One allotment as it is made."""

    policy: Policy
    now_s: float
    quotas: Mapping[str, Quota]
    placing: Placing
    claims: Sequence[Claim]
    machines: Sequence[Machine]
    order: list[Claim] = field(init=False)
    idle: list[Machine] = field(init=False)
    load_s: dict[str, float] = field(init=False)  # by place
    owned: Counter[str] = field(default_factory=Counter)  # workers by owner
    active: Counter[str] = field(default_factory=Counter)  # jobs by owner
    counts: dict[str, int] = field(default_factory=dict)  # workers of jobs that begin
    gives: dict[str, Gives] = field(default_factory=dict)
    waits: dict[str, Waiting] = field(default_factory=dict)
    reserved: int = 0  # idle workers that wait for more to be given

    def __post_init__(self) -> None:
        self.order = ordered(self.claims, self.policy, self.now_s, self.quotas)
        held = {name: claim for claim in self.claims for name in claim.held}
        self.idle = [machine for machine in self.machines if machine.name not in held]
        self.load_s = defaultdict(float)
        for machine in self.machines:
            if machine.name in held:
                left_s = held[machine.name].left_s(len(held[machine.name].held))
                self.load_s[machine.place] += left_s if isfinite(left_s) else 0.0
        for claim in self.claims:
            self.owned[claim.owner] += len(claim.held)
            self.active[claim.owner] += claim.runs

    @property
    def spare(self) -> int:
        """Idle workers that nobody is to have yet."""
        return len(self.idle) - self.reserved - sum(self.counts.values())

    def allotment(self) -> Allotment:
        """Return what is to change."""
        waiting = [claim for claim in self.order if not claim.runs]
        sizes = self.sizes() if waiting else {}
        for at, claim in enumerate(waiting):
            if not self._begins(claim):
                could = self._wait(claim, sizes)
                if could and (self.policy.strict or urgent(claim, self.now_s)):
                    self._behind(claim, waiting[at + 1 :])
                    break
        growing = self._fill(sizes)
        starts = {claim.job: self._placed(claim, self.counts[claim.job]) for claim in self._begun()}
        grows = {
            claim.job: self._placed(claim, growing[claim.job]) for claim in self.order if claim.job in growing
        }
        self._predict(waiting)
        return Allotment(starts, grows, self.gives, self.waits)

    def _begun(self) -> list[Claim]:
        return [claim for claim in self.order if claim.job in self.counts]

    # ------------------------------------------------------------ sizes

    def sizes(self) -> dict[str, int]:
        """Return by job how many of all workers it would have if nothing were held yet: the least each in
        their order, then each further one where it saves most."""
        room = len(self.machines) - sum(len(claim.held) for claim in self.claims if claim.fixed)
        found: dict[str, int] = {}
        for claim in self.order:
            if claim.fixed:
                found[claim.job] = len(claim.held)
            elif claim.least <= room and (claim.runs or self._quota_words(claim) == ""):
                found[claim.job] = claim.least
                room -= claim.least
        movable = [claim for claim in self.order if claim.job in found and not claim.fixed]
        for job, count in self._shared(movable, found, room).items():
            found[job] += count
        return found

    def _shared(self, claims: Sequence[Claim], have: Mapping[str, int], room: int) -> Counter[str]:
        """Return how many more of ``room`` workers each of these jobs gets, in their order by their shares,
        and what others have no use for."""
        n, total = len(claims), room + sum(have[claim.job] for claim in claims)
        owned, more = Counter[str](), Counter[str]()
        for claim in self.claims:
            owned[claim.owner] += have.get(claim.job) or self.counts.get(claim.job) or len(claim.held)
        for shared in (True, False):
            for at, claim in enumerate(claims):
                size, quota = have[claim.job] + more[claim.job], self.quotas.get(claim.owner, NO_QUOTA)
                share = ((n - at) / n) ** SHARED - ((n - at - 1) / n) ** SHARED
                wanted = round(share * total) if shared else total
                allowed = quota.workers - owned[claim.owner] if quota.workers else room
                extra = max(0, min(room, wanted - size, claim.most - size, allowed))
                more[claim.job] += extra
                owned[claim.owner] += extra
                room -= extra
        return more

    def _fill(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Give idle workers that nobody waits for to jobs that begin, then to those that run where that is
        worth the move; returns the latter's."""
        begun = self._begun()
        for claim in begun:
            wanted = min(self.spare, sizes.get(claim.job, 0) - self.counts[claim.job], self._allowed(claim))
            self.counts[claim.job] += max(0, wanted)
        for job, more in self._shared(begun, self.counts, self.spare).items():
            self.counts[job] += more
        running = [c for c in self.order if c.runs and not (c.fixed or c.stays or c.job in self.gives)]
        if self.waits and self.policy.strict:
            return {}
        held = {claim.job: len(claim.held) for claim in running}
        grown = self._shared(running, held, self.spare)
        return {
            claim.job: grown[claim.job]
            for claim in running
            if grown[claim.job] and _saves_s(claim, held[claim.job], grown[claim.job]) > WORTH * claim.pause_s
        }

    # ------------------------------------------------------------ those that wait

    def _begins(self, claim: Claim) -> bool:
        """Have a job begin where the idle workers suffice."""
        if self._quota_words(claim) or claim.least > self.spare or self._scattered(claim):
            return False
        if claim.must and claim.must not in {machine.name for machine in self._left()}:
            return False
        self.counts[claim.job] = claim.least
        self.active[claim.owner] += 1
        return True

    def _scattered(self, claim: Claim) -> bool:
        """Whether the idle workers are spread over more places than a job would have to cross."""
        if not claim.together:
            return False
        return fewest_places(self._left(), claim.least) > fewest_places(self.machines, claim.least)

    def _left(self) -> list[Machine]:
        """Return the idle workers without those of jobs that begin."""
        left = list(self.idle)
        for claim in self._begun():
            names = self._named(claim, left, self.counts[claim.job])
            left = [machine for machine in left if machine.name not in names]
        return left

    def _allowed(self, claim: Claim) -> int:
        """Return how many more workers a job's owner may have."""
        quota = self.quotas.get(claim.owner, NO_QUOTA)
        begun = sum(self.counts[other.job] for other in self._begun() if other.owner == claim.owner)
        return quota.workers - self.owned[claim.owner] - begun if quota.workers else len(self.machines)

    def _quota_words(self, claim: Claim) -> str:
        """Why a job's owner may not have it begin, "" when it may."""
        quota = self.quotas.get(claim.owner, NO_QUOTA)
        if quota.jobs and self.active[claim.owner] >= quota.jobs:
            return f"{claim.owner} may have {quota.jobs} jobs at once"
        if quota.workers and claim.least > self._allowed(claim):
            has = quota.workers - self._allowed(claim)
            return f"{claim.owner} may have {quota.workers} workers at once, and has {has}"
        return ""

    def _wait(self, claim: Claim, sizes: Mapping[str, int]) -> bool:
        """Note why a job waits; where others give it workers, keep the idle ones for it. Returns whether it
        could begin with more idle ones."""
        words, all_of_them = self._quota_words(claim), len(self.machines)
        if not words and claim.least > all_of_them:
            words = f"needs {_workers(claim.least)}, the fleet has {all_of_them}"
        if not words and claim.must and claim.must not in {machine.name for machine in self.machines}:
            words = f"worker {claim.must} has the job's data, and is not here"
        if words:
            self.waits[claim.job] = Waiting(words)
            return False
        givers = self._givers(claim, sizes)
        if not givers:
            idle, where = max(0, self.spare), " of as few places as could be" * claim.together
            where += f" and {claim.must} among them" if claim.must else ""
            self.waits[claim.job] = Waiting(f"needs {_workers(claim.least)}{where}, {idle} idle")
            return not claim.must
        for giver, keep in givers.items():
            self.gives[giver.job] = Gives(keep, claim.job, self._giving_words(giver, keep, claim))
        names = " and ".join(giver.job for giver in givers)
        verb = "give" if len(givers) > 1 else "gives"
        self.waits[claim.job] = Waiting(f"{names} {verb} workers at the next commit", self.now_s)
        self.reserved += max(0, self.spare)
        return True

    def _behind(self, first: Claim, rest: Sequence[Claim]) -> None:
        """Those after a job that nobody overtakes wait, too; what is idle waits for it."""
        for claim in rest:
            self.waits[claim.job] = Waiting(f"{first.job} goes first")
        self.reserved += max(0, self.spare)

    def _givers(self, claim: Claim, sizes: Mapping[str, int]) -> dict[Claim, int]:
        """Return who gives workers so that a job can begin, and how many each keeps; none where it is not
        worth that."""
        if not self.policy.yields:
            return {}
        lacks, cost_s, found = claim.least - self.spare, 0.0, dict[Claim, int]()
        behind = self.order[self.order.index(claim) + 1 :]
        offers = [offer for other in self.order if (offer := self._offer(claim, other, behind, sizes))]
        for _, price_s, giver, keep in sorted(offers, key=lambda offer: offer[:2]):
            if lacks <= 0:
                break
            if giver not in found:
                found[giver] = keep
                lacks -= len(giver.held) - keep
                cost_s += price_s
        if lacks > 0:
            return {}
        if all(RANK[giver.priority] > RANK[claim.priority] for giver in found):
            return found
        if not isfinite(claim.work_s):  # nobody knows what others would wait for
            return {}
        running = [other for other in self.order if other.runs]
        starts_s, _ = predicted_starts([claim], running, self.spare, self.now_s)[claim.job]
        return found if starts_s - self.now_s > WORTH * cost_s else {}

    def _offer(
        self, claim: Claim, other: Claim, behind: Sequence[Claim], sizes: Mapping[str, int]
    ) -> tuple[int, float, Claim, int] | None:
        """Return what a running job could give: (rank, seconds that it loses a worker, job, workers kept)."""
        if not other.runs or other.fixed or other.job in self.gives:
            return None
        lower = RANK[other.priority] > RANK[claim.priority]
        if not lower and (other.stays or not self.policy.moves):
            return None
        keeps = max(sizes[other.job], other.least) if sizes.get(other.job) else 0
        if keeps >= len(other.held) or not (keeps or other in behind):
            return None
        # While the other runs it is slower, or stands still; then it is moved again.
        slower = 1.0 - (faster(keeps) / faster(len(other.held)) if keeps else 0.0)
        lasts_s = claim.left_s(max(claim.least, sizes.get(claim.job, 0)))
        return 2 * (not lower) + (not keeps), slower * _known(lasts_s) + 2.0 * other.pause_s, other, keeps

    def _giving_words(self, giver: Claim, keep: int, claim: Claim) -> str:
        kept = (
            f"keeps {keep} of {len(giver.held)} workers" if keep else f"gives its {_workers(len(giver.held))}"
        )
        why = (
            "of a higher priority"
            if RANK[claim.priority] < RANK[giver.priority]
            else "which would wait longer"
        )
        return f"{kept}, for {claim.job}, {why}"

    # ------------------------------------------------------------ places and times

    def _placed(self, claim: Claim, count: int) -> tuple[str, ...]:
        names = self._named(claim, self.idle, count)
        self.idle = [machine for machine in self.idle if machine.name not in names]
        return names

    def _named(self, claim: Claim, idle: Sequence[Machine], count: int) -> tuple[str, ...]:
        first = tuple(machine.name for machine in idle if machine.name == claim.must)
        others = [machine for machine in idle if machine.name != claim.must]
        return first + self.placing(others, count - len(first), self.load_s, claim.had)

    def _predict(self, waiting: Sequence[Claim]) -> None:
        """Predict when each job that waits for workers begins."""
        later = [claim for claim in waiting if claim.job in self.waits]
        begun = [claim for claim in self.order if claim.runs or claim.job in self.counts]
        free = len(self.idle)
        playing = [_held(claim, self.counts.get(claim.job, 0)) for claim in begun]
        counted = [claim for claim in later if claim.least <= len(self.machines)]
        expected = predicted_starts(counted, playing, free, self.now_s)
        for claim in counted:
            known, (starts_s, after) = self.waits[claim.job], expected[claim.job]
            if known.starts_s == inf:
                self.waits[claim.job] = Waiting(known.reason, starts_s, after)


def _held(claim: Claim, count: int) -> Claim:
    return claim if claim.runs else replace(claim, held=("",) * count)


def _saves_s(claim: Claim, size: int, more: int) -> float:
    """Return the seconds that ``more`` workers save, below 0 those that fewer cost."""
    known = claim if isfinite(claim.work_s) else replace(claim, work_s=UNKNOWN_WORK_S)
    return known.left_s(size) - known.left_s(size + more)


def _known(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0


def _workers(count: int) -> str:
    return f"{count} worker" + "s" * (count != 1)
