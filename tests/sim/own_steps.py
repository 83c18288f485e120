"""What a simulated worker computes of a peer that takes steps of its own: those, its rounds, and both again.

Stages of one peer exchange what they make of each step; those of several exchange what their steps came to.
Whoever takes a stage over repeats the commits that its peer has heard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.messages import events as ev
from strategies.exchanges.partners import group_of, groups_of, joins
from tests.sim import local_steps
from tests.sim.clock import digest
from tests.sim.send_log import Wanted
from tests.sim.stage import PART, Part, Tensors
from tests.sim.values import number
from worker.session import events as e

if TYPE_CHECKING:
    from coordinator.messages import instructions as do
    from tests.sim.compute import Bench
    from tests.sim.stage import Held, Message

APPLY_S = 0.03
RECONFIGURE_S = 0.05
REPEAT_S = 0.1
AGAIN_S = 1.0


class OwnSteps:
    """The part of a ``Bench`` that concerns peers."""

    # ------------------------------------------------------------ a period in one go

    def _local_step(self: Bench) -> None:
        """Take a step of the period, or begin its round after the last."""
        held, running = self.held, self.running
        if held is None or running is None:
            return
        count = running[2] + 1 - held.step
        if held.taken < count:
            own, step = held.own_now, held.step + held.taken
            given = local_steps.batch(step, held.replica)
            held.own = local_steps.stepped(own, step, local_steps.forward(given, own, sorted(own)))
            held.taken += 1
            self._later(local_steps.LOCAL_STEP_S, self._local_step)
            return
        self._begin_round()

    # ------------------------------------------------------------ a step that is to be committed

    def _own_step(self: Bench) -> None:
        held, running = self.held, self.running
        if held is None or running is None:
            return
        at = held.step + held.taken
        assert running[2] == at, f"{self.process.name} runs step {running[2]} after {at} steps"
        self._due = True
        self._own_forward()

    def _own_forward(self: Bench) -> None:
        held, running = self.held, self.running
        if held is None or running is None or not self._due or (*running, True) in self._sent:
            return
        job, version, step = running
        given = local_steps.batch(step, held.replica) if held.stage == 0 else self.inbox.get((*running, True))
        if given is None:
            return
        value = local_steps.forward(given, held.own_now, sorted(held.own_now))
        self._sent[*running, True] = value
        self.log.add(version, step, True, value)
        if not held.last:
            self.send(held.neighbour(+1), Tensors(job, version, step, True, value))
        self._own_backward()

    def _own_backward(self: Bench) -> None:
        held, running = self.held, self.running
        if held is None or running is None or (*running, True) not in self._sent:
            return
        job, version, step = running
        loss = self._sent[*running, True] if held.last else self.inbox.get((*running, False))
        if loss is None:
            return
        self.log.add(version, step, False, loss)
        if held.stage:
            self.send(held.neighbour(-1), Tensors(job, version, step, False, loss))
        held.next, self.running = local_steps.stepped(held.own_now, step, loss), None
        losses = (1.0,) if held.last else ()
        self.post(ev.StepReady(job, version, step, losses, (), forward_s=self._computed_s))

    # ------------------------------------------------------------ rounds

    def _begin_round(self: Bench) -> None:
        held, running = self.held, self.running
        if held is None or running is None:
            return
        job, version, last = running
        self._due = self._joining = True
        said = local_steps.coded(held.own)
        self.log.add(version, last, PART + held.rank, said)
        for peer in held.other_ranks:
            self.send(peer, Part(job, version, last, held.rank, said))
        self._join_peers()

    def _join_peers(self: Bench) -> None:
        """Report the period once the part of every peer is here."""
        held, running = self.held, self.running
        if held is None or running is None or not self._joining:
            return
        job, version, last = running
        ranks, group = self._group(held, last)
        found = {rank: self.parts.get((*running, rank)) for rank in ranks}
        if None in found.values():
            return
        results = self._results(held, [str(part) for part in found.values()])
        if last >= self.process.cheats_from:
            results = {name: digest("cheat", value) for name, value in results.items()}
        held.results[last] = results
        shown = number(digest(*results.values()))
        message = ev.StepReady(
            job, version, last, forward_s=self._computed_s,
            losses=(shown,) * held.taken if held.last else (),
            receipts=local_steps.receipts(held.plan, held.rank, group, last, results),
        )  # fmt: skip
        self.running = None
        self.post(message)

    @staticmethod
    def _group(held: Held, last: int) -> tuple[list[int], tuple[int, ...]]:
        """Return the ranks that this one hears of in a round, and the peers of its group."""
        from tests.sim import compute

        found = getattr(compute, "groups_of", groups_of)(held.plan, held.work.spec.training, last)
        group = group_of(held.replica, found)
        of = held.plan.places
        return [rank for rank in held.other_ranks.values() if of[rank].replica in group], group

    @staticmethod
    def _results(held: Held, messages: list[str]) -> dict[str, str]:
        return local_steps.totals([held.own, *map(local_steps.read, messages)], sorted(held.own))

    def _apply_own(self: Bench, commit: e.StepCommit) -> None:
        """Carry out a commit of a peer's own step, or of a round."""
        held = self.held
        assert held is not None
        if commit.own:
            held.own, held.taken = held.next, held.taken + 1
            return
        self._use(held, commit.step, held.results.pop(commit.step))

    @staticmethod
    def _use(held: Held, last: int, results: dict[str, str]) -> None:
        joined = joins(held.plan, held.work.spec.training, last)
        held.tensors = local_steps.used(held.tensors, last, results, joined)
        held.taken, held.own = 0, {}

    def _waits_of_peer(self: Bench, held: Held, running: tuple[str, int, int]) -> ev.Waits | None:
        """What a step of its own, or a round, waits for."""
        waited_s, last = self.process.clock.now_s - self._asked_s, running[2]
        if held.stepwise and not self._joining:
            sent = (*running, True) in self._sent
            if not sent and held.stage:
                return ev.Waits(held.neighbour(-1), "forward", last, waited_s)
            return (
                ev.Waits(held.neighbour(+1), "backward", last, waited_s) if sent and not held.last else None
            )
        ranks, _ = self._group(held, last)
        away = next(
            (w for w, r in held.other_ranks.items() if r in ranks and (*running, r) not in self.parts), ""
        )
        return ev.Waits(away, "part", last, waited_s) if away else None

    def _peer_arrived(self: Bench, message: Message) -> None:
        """Take in a message of another stage of the peer, or of another peer."""
        if isinstance(message, Part):
            self._join_peers()
            return
        if self.held is not None and self.running is not None and not self._joining:
            self._own_forward()
            self._own_backward()

    # ------------------------------------------------------------ both again

    def _repeat_own(self: Bench, held: Held) -> None:
        """Repeat the next commit, or be loaded after the last."""
        self._asking = False
        if not self._commits and not self._said_loaded:
            self._said_loaded = True
            if not self.standby:
                self.held, self.repeats = held, None
            self.post(ev.Loaded(held.work.job, held.work.plan.version, 0.6))
            if not self.standby:
                return
        commit = self._commits[0] if self._commits else self._heard(held)
        if commit is None:
            return
        at = held.step + held.taken
        if commit.own:
            assert commit.step == at, f"{self.process.name} repeats step {commit.step} after {at} steps"
        self._asking, self._commit = True, commit
        self._asked_s, self._went = self.process.clock.now_s, None
        if not commit.own:
            said = local_steps.coded(held.own)
            self._record(commit.version, commit.step, PART + held.rank, said)
        self._ask_own(held, commit)
        self._go_on_own()

    def _heard(self: Bench, held: Held) -> do.StepCommit | None:
        """Do what a standby has heard up to the next commit, which is returned."""
        while self.queue:
            order = self.queue[0]
            if isinstance(order, e.StepCommit):
                return order
            self.queue.popleft()
            held.plan = order.message.plan
            if not order.standby:
                self._stop()
                self.held = held
                self._connect(held, order.job, order.version, order.step)
                return None
        return None

    def _senders_of(self: Bench, held: Held, commit: Any) -> dict[int, str]:
        """Return who sends each message that a commit's step, or round, takes."""
        if commit.own:
            return {int(forwards): peer for forwards, peer in held.neighbours.items()}
        ranks, _ = self._group(held, commit.step)
        return {PART + rank: worker for worker, rank in held.other_ranks.items() if rank in ranks}

    def _missing_own(self: Bench, held: Held) -> dict[int, str]:
        commit = self._commit
        at = (held.work.job, commit.version, commit.step)
        return {w: peer for w, peer in self._senders_of(held, commit).items() if (*at, w) not in self.kept}

    def _ask_own(self: Bench, held: Held, commit: Any) -> None:
        """Ask for what is missing, and again where nobody answers."""
        if held is not self.repeats or not self._asking or self._commit is not commit:
            return
        for what, peer in self._missing_own(held).items():
            self.send(peer, Wanted(self.process.name, held.work.job, commit.version, commit.step, what))
        self.process.after(AGAIN_S, lambda: self._ask_own(held, commit))

    def _answered_own(self: Bench, held: Held, answer: Any) -> None:
        commit = self._commit
        if (answer.job, answer.version, answer.step) != (held.work.job, commit.version, commit.step):
            return
        if self._missing_own(held).get(answer.forwards) != answer.sender:
            return
        self.progress += 1
        if answer.value is None:
            reason = f"a message of step {answer.step} has left the send log"
            self._stop()
            self.post(e.StageFailed(held.work.job, held.work.plan.version, held.work.first_step, reason))
            return
        self.kept[answer.job, answer.version, answer.step, answer.forwards] = answer.value
        self._go_on_own()

    def _go_on_own(self: Bench) -> None:
        held, commit = self.repeats, self._commit
        assert held is not None
        at = (held.work.job, commit.version, commit.step)
        if commit.own and self._went is None:
            first = held.stage == 0
            given = local_steps.batch(commit.step, held.replica) if first else self.kept.get((*at, True))
            if given is None:
                return
            self._went = local_steps.forward(given, held.own_now, sorted(held.own_now))
            self._record(commit.version, commit.step, True, self._went)
        if self._missing_own(held):
            return
        if commit.own:
            loss = self._went if held.last else self.kept[(*at, False)]
            self._record(commit.version, commit.step, False, str(loss))
        self._later(REPEAT_S, self._repeated_own)

    def _repeated_own(self: Bench) -> None:
        held, commit = self.repeats, self._commit
        assert held is not None
        at = (held.work.job, commit.version, commit.step)
        if commit.own:
            loss = self._went if held.last else self.kept[(*at, False)]
            held.own, held.taken = local_steps.stepped(held.own_now, commit.step, str(loss)), held.taken + 1
        else:
            messages = [self.kept[(*at, what)] for what in self._senders_of(held, commit)]
            self._use(held, commit.step, self._results(held, messages))
            held.step = commit.step + 1
            self.applied(held.work.job, commit.version, commit.step)
            if commit.store and self._commits:
                self._snapshot(held, commit.version, commit.step)
        held.ran = commit.version
        (self._commits if self._commits else self.queue).popleft()
        if self.standby:
            self.post(e.StepApplied(held.work.job, commit.version, commit.step))
        self._repeat_own(held)
