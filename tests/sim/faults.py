"""What goes wrong in a run, and when: drawn from a seed, so that a run can be told, shrunk and kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim.coordinator import WRITE_S
from tests.sim.worker import PEER_SILENCE_S
from worker.session import events

if TYPE_CHECKING:
    from tests.sim.worker import Worker
    from tests.sim.world import World

SLOW_WRITE_S = 1.0


@dataclass(frozen=True)
class Fault:
    """``at_s`` after the beginning, for ``seconds`` where that means something."""

    at_s: float
    seconds: float = 0.0

    def strike(self, world: World) -> None:
        """Do it."""
        raise AssertionError("every fault does something")


@dataclass(frozen=True)
class OnWorker(Fault):
    worker: str = ""


@dataclass(frozen=True)
class Crash(OnWorker):
    """Killed; started anew after ``seconds``, never when 0."""

    def strike(self, world: World) -> None:
        worker = world.workers[self.worker]
        if not worker.alive:
            return
        worker.kill()
        world.network.died(worker)
        if self.seconds:
            world.clock.after(self.seconds, worker.revive)


@dataclass(frozen=True)
class Outage(Crash):
    """The same of two workers at once, in one house whose power fails."""

    other: str = ""

    def strike(self, world: World) -> None:
        super().strike(world)
        Crash(self.at_s, self.seconds, self.other).strike(world)


@dataclass(frozen=True)
class KilledForMemory(OnWorker):
    """Its stage takes more memory than it may: the process that computes is killed, its session goes on."""

    def strike(self, world: World) -> None:
        worker = world.workers[self.worker]
        if worker.alive and not worker.frozen:
            worker.killed_for_memory()


@dataclass(frozen=True)
class Freeze(OnWorker):
    """Stopped, as a laptop that sleeps; its peers notice its silence."""

    def strike(self, world: World) -> None:
        worker = world.workers[self.worker]
        if not worker.alive or worker.frozen:
            return
        worker.freeze()
        world.clock.after(self.seconds, worker.thaw)
        for peer in world.workers.values():
            if peer is not worker:
                peer.after(PEER_SILENCE_S, partial(peer.notice_silence, worker))


@dataclass(frozen=True)
class Slow(OnWorker):
    """Another program takes most of the machine."""

    def strike(self, world: World) -> None:
        worker = world.workers[self.worker]
        worker.slowness = 5.0
        world.clock.after(self.seconds, lambda: setattr(worker, "slowness", 1.0))


@dataclass(frozen=True)
class Hang(OnWorker):
    """What it computes never ends, for ever when ``seconds`` is 0; its session goes on as if nothing were
    wrong."""

    def strike(self, world: World) -> None:
        worker, life = world.workers[self.worker], world.workers[self.worker].life
        worker.hung = True
        if self.seconds:
            world.clock.after(self.seconds, lambda: _heal(worker, life))


@dataclass(frozen=True)
class Lie(Hang):
    """The same, and it claims to wait for an innocent while its progress goes on."""

    innocent: str = ""

    def strike(self, world: World) -> None:
        super().strike(world)
        world.workers[self.worker].claims = self.innocent


@dataclass(frozen=True)
class Poison(OnWorker):
    """Its device is broken: what it computes is not finite, for ever when ``seconds`` is 0."""

    def strike(self, world: World) -> None:
        worker, life = world.workers[self.worker], world.workers[self.worker].life
        worker.poison = True
        if self.seconds:
            world.clock.after(self.seconds, lambda: _heal(worker, life))


@dataclass(frozen=True)
class Slander(OnWorker):
    """It calls its gradients not finite, which they are."""

    def strike(self, world: World) -> None:
        world.workers[self.worker].slanders = True


@dataclass(frozen=True)
class Cheat(OnWorker):
    """From now on its gradients are others, though finite, and it says nothing of that."""

    def strike(self, world: World) -> None:
        world.workers[self.worker].cheats_from = 0


@dataclass(frozen=True)
class Slip(OnWorker):
    """It repeats steps wrong, and computes them right."""

    def strike(self, world: World) -> None:
        world.workers[self.worker].slips = True


@dataclass(frozen=True)
class SilentLink(OnWorker):
    """What two workers send each other is lost, and neither notices."""

    peer: str = ""

    def strike(self, world: World) -> None:
        world.network.silence(self.worker, self.peer, self.seconds)


def _heal(worker: Worker, life: int) -> None:
    if worker.life == life:
        worker.hung, worker.claims, worker.poison = False, "", False


@dataclass(frozen=True)
class Leave(OnWorker):
    """Its owner wants the machine back."""

    def strike(self, world: World) -> None:
        worker = world.workers[self.worker]
        if worker.alive and not worker.frozen:
            worker.hear(events.LeaveAsked("its owner wants the machine"))


@dataclass(frozen=True)
class Partition(OnWorker):
    """Nothing passes between a worker and everybody else."""

    def strike(self, world: World) -> None:
        world.network.partition(self.worker, "*", self.seconds)


@dataclass(frozen=True)
class CutOff(OnWorker):
    """Nothing passes between a worker and the coordinator."""

    def strike(self, world: World) -> None:
        world.network.partition(self.worker, world.coordinator.name, self.seconds)


@dataclass(frozen=True)
class BreakStreams(OnWorker):
    """A router forgets a worker's connections; with ``half`` only the others notice soon."""

    half: bool = False

    def strike(self, world: World) -> None:
        world.network.break_streams(world.workers[self.worker], self.half)


@dataclass(frozen=True)
class ClockJump(OnWorker):
    """A worker's clock is set, forwards or backwards, by up to hours."""

    def strike(self, world: World) -> None:
        world.workers[self.worker].clock_off_s = (self.seconds - 4.0) * 1000.0


@dataclass(frozen=True)
class KillCoordinator(Fault):
    """Killed, and started anew after ``seconds``."""

    def strike(self, world: World) -> None:
        if world.coordinator.alive:
            world.coordinator.kill()
            world.network.died(world.coordinator)
            world.clock.after(self.seconds, partial(world.restart, world.coordinator))


@dataclass(frozen=True)
class FreezeCoordinator(Fault):
    """Its machine stalls."""

    def strike(self, world: World) -> None:
        world.coordinator.freeze()
        world.clock.after(self.seconds, world.coordinator.thaw)


@dataclass(frozen=True)
class TakeOver(Fault):
    """Another machine starts a coordinator on the same database: it took the first for dead."""

    def strike(self, world: World) -> None:
        world.take_over(self.seconds)


@dataclass(frozen=True)
class SlowDisk(Fault):
    """A write takes a second, not milliseconds."""

    def strike(self, world: World) -> None:
        folder = world.coordinator.folder
        folder.write_s = SLOW_WRITE_S
        world.clock.after(self.seconds, lambda: setattr(folder, "write_s", WRITE_S))


@dataclass(frozen=True)
class FullDisk(Fault):
    """No write succeeds."""

    def strike(self, world: World) -> None:
        folder = world.coordinator.folder
        folder.full = True
        world.clock.after(self.seconds, lambda: setattr(folder, "full", False))


@dataclass(frozen=True)
class LossyWeather(Fault):
    """A fifth of all messages is lost once or more."""

    def strike(self, world: World) -> None:
        before = world.network.loss
        world.network.loss = 0.2
        world.clock.after(self.seconds, lambda: setattr(world.network, "loss", before))


@dataclass(frozen=True)
class Repeats(Fault):
    """Half of what workers say, but heartbeats, arrives once more, up to seconds later."""

    def strike(self, world: World) -> None:
        world.network.repeats = 0.5
        world.clock.after(4 * self.seconds, lambda: setattr(world.network, "repeats", 0.0))


WEIGHTS: dict[type[Fault], int] = {
    Crash: 6, Freeze: 3, Slow: 2, Leave: 1, Partition: 3, CutOff: 3, BreakStreams: 4, KillCoordinator: 3,
    ClockJump: 1, FreezeCoordinator: 1, SlowDisk: 1, FullDisk: 1, LossyWeather: 1, Repeats: 4,
    Hang: 1, Lie: 1, SilentLink: 1, Poison: 1, Outage: 1,
}  # fmt: skip
"""What a run may draw beside a ``TakeOver``."""


def drawn(random: Random, workers: list[str], within_s: float, most: int = 6) -> tuple[Fault, ...]:
    """Draw a run's faults; all are over ``within_s`` after the beginning."""
    found: list[Fault] = []
    kinds: list[type[Fault]] = list(WEIGHTS)
    weights = list(WEIGHTS.values())
    for _ in range(random.randint(0, most)):
        (kind,) = random.choices(kinds, weights)
        seconds = round(random.choice((0.1, 0.5, 1.0, 2.0, 5.0, 9.0)) * (0.5 + random.random()), 2)
        at_s = round(random.random() * max(1.0, within_s - seconds), 2)
        if kind is BreakStreams:
            found.append(BreakStreams(at_s, 0.0, random.choice(workers), random.random() < 0.3))
        elif kind in (Lie, SilentLink, Outage):
            found.append(kind(at_s, seconds, *random.sample(workers, 2)))
        elif issubclass(kind, OnWorker):
            found.append(kind(at_s, seconds, random.choice(workers)))
        else:
            found.append(kind(at_s, seconds))
        if kind is Repeats:  # which is worth most where plans change meanwhile
            soon_s = round(at_s + 3.0 * random.random(), 2)
            found.append(BreakStreams(soon_s, 0.0, random.choice(workers)))
    return tuple(sorted(found, key=lambda fault: fault.at_s))
