"""Runs of Flower apps: who takes part, what is under way, what each is sent. Pure.

A run is opened by its owner, offered to every idle worker that runs apps, begun with some of those
that are ready, and ended by its owner. From then on each task goes to its node and each reply back;
a node that is lost answers what it still owed with Flower's error for an absent node. Partitions
are fixed when the run begins: a worker that returns gets its own, a new one that of a lost one.
Everything a peer sends is judged here; times come in as arguments.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import UsageError
from coordinator.apps.state import (
    DropParts,
    GiveBack,
    HandOver,
    Instruction,
    Lend,
    Place,
    Run,
    Say,
    Standing,
    TellNode,
    TellOwner,
    View,
    node_id,
)
from protos import atoll_apps_pb2 as pb
from protos.telemetry import Event as Name
from protos.text_limits import REASON_CHARS, clean

MAX_RUNS = 16
MAX_NODES = 10_000  # of one run
MAX_UNDER_WAY = 20_000  # tasks of one run without a reply
OWNER_RETURNS_S = 5.0  # a run whose owner's stream broke waits so long for it
HELD_S = 20.0  # a run that a worker still holds may be opened again by its owner, ours being restarted
MAX_ENDED = 1000  # runs remembered after their end
NODE_UNAVAILABLE = 5  # Flower's code


@dataclass(slots=True)
class AppRuns:
    """All runs of one coordinator; methods return what is to be done, in order."""

    view: View
    runs: dict[int, Run] = field(default_factory=dict)
    attending: dict[str, None] = field(default_factory=dict)
    held: dict[tuple[str, int], float] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)  # the newest, with the reason
    _out: list[Instruction] = field(default_factory=list)

    def of(self, run: int) -> Run:
        """A run that was opened; UsageError otherwise."""
        if run not in self.runs:
            raise UsageError(f"run {run} is not open; it has ended, or its coordinator was restarted")
        return self.runs[run]

    # ------------------------------------------------------------ the owner

    def opened(self, request: pb.AppOpen, owner: str = "", now_s: float = 0.0) -> list[Instruction]:
        """A new run, or one whose owner is back: its newest stream counts, for the one before may have
        been cut without a word. UsageError for anybody else, for a run that was ended meanwhile, and
        when there are too many."""
        known = self.runs.get(request.run)
        if known is not None:
            if not (request.resume and _same_owner(known, request)):
                raise UsageError(f"run {request.run} already has an owner")
            known.owner_gone_s = None
            self._tell_nodes(known) if known.partitions else self._tell_fleet(known)
            return self._done()
        if request.resume and request.run in self.ended:
            # Its nodes' states are gone: going on would be another run under this one's name.
            raise UsageError(f"run {request.run} was ended: {self.ended[request.run]}; start it again")
        if len(self.runs) >= MAX_RUNS:
            raise UsageError(f"{MAX_RUNS} app runs are open; wait until one has ended")
        run = self.runs[request.run] = Run(request.run, request.app, request.key, owner, now_s)
        for key in [key for key in self.held if key[1] == request.run]:
            del self.held[key]
        self._say(Name.APP_OPENED, run, name=run.app.name, hash=run.app.hash)
        self._offer(run)
        self._tell_fleet(run)
        return self._done()

    def begun(self, run: Run, request: pb.AppBegin) -> list[Instruction]:
        """Start with ``nodes`` nodes on the workers that are ready; where they are too few for that, only the
        fleet is said.

        A run that goes on after our restart starts with those that are back; the others follow.
        """
        if request.nodes > MAX_NODES:
            raise UsageError(f"{request.nodes} nodes; a run has at most {MAX_NODES}")
        ready = self._startable(run)
        if run.partitions:
            self._tell_nodes(run)
            return self._done()
        room = sum(place.capacity for place in ready)
        if request.nodes < 1 or (request.nodes > room and not request.keep):
            self._tell_fleet(run)
            return self._done()
        run.config = dict(request.run_config)
        run.owned = {node.partition: node.worker for node in request.keep if node.partition < request.nodes}
        run.partitions = request.nodes
        self._seat(run, ready)
        self._tell_nodes(run)
        self._say(Name.APP_BEGUN, run, nodes=request.nodes)
        return self._done()

    def task(self, run: Run, task: pb.AppTask) -> list[Instruction]:
        """A message for a node; for one that is not there the error comes back at once."""
        place = run.places.get(run.where.get(task.node, ""))
        if len(run.waiting) >= MAX_UNDER_WAY:
            raise UsageError(f"{MAX_UNDER_WAY} messages of this run wait for replies; pull some first")
        if task.message in run.waiting:
            return self._done()  # said again after the owner's stream broke
        if place is None:
            self._fail(run, task.message, f"node {task.node} does not take part in this run now")
            return self._done()
        task.run = run.run
        place.under_way[task.message] = task
        run.waiting[task.message] = place.worker
        self._tell(place.worker, pb.ToNode(task=task))
        return self._done()

    def cancelled(self, run: Run, messages: Iterable[str]) -> list[Instruction]:
        """Nobody waits for these replies any more."""
        by_worker: dict[str, list[str]] = {}
        for message in messages:
            worker = run.waiting.pop(message, None)
            if worker is not None:
                run.places[worker].under_way.pop(message, None)
                by_worker.setdefault(worker, []).append(message)
        for worker, some in by_worker.items():
            self._tell(worker, pb.ToNode(cancel=pb.AppCancel(run=run.run, messages=some)))
        return self._done()

    def forgotten(self, run: Run, hashes: frozenset[str], message: str) -> list[Instruction]:
        """Parts that no later message refers to; with ``message``: of a reply that was taken in."""
        self._out.append(DropParts(run.run, hashes, message))
        if message:
            worker = run.answered.pop(message, None)
            if worker is not None:
                # It keeps what it answered until then, should we be restarted.
                self._tell(worker, pb.ToNode(forget=pb.AppForget(run=run.run, message=message)))
            return self._done()
        for place in run.hosts():
            self._tell(place.worker, pb.ToNode(forget=pb.AppForget(run=run.run, hashes=sorted(hashes))))
        return self._done()

    def owner_lost(self, run: int, now_s: float) -> list[Instruction]:
        """The owner's stream broke without a word."""
        if run in self.runs:
            self.runs[run].owner_gone_s = now_s
        return self._done()

    def closed(self, run: int, reason: str) -> list[Instruction]:
        """The run is over: workers stop its app and are free again."""
        found = self.runs.pop(run, None)
        if found is None:
            return self._done()
        self.ended[run] = reason
        while len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]
        for place in found.places.values():
            self._tell(place.worker, pb.ToNode(end=pb.AppEnd(run=run, reason=reason)))
            if place.standing is Standing.NODE:
                self._out.append(GiveBack(place.worker, run, f"run {run} ended"))
        self._out.append(DropParts(run, None, None))
        self._out.append(TellOwner(run, pb.ToApp(ended=pb.AppEnded(reason=reason))))
        self._say(Name.APP_ENDED, found, reason=reason)
        return self._done()

    def listed(self) -> pb.AppRunList:
        """Facts of every open run."""
        found = pb.AppRunList()
        for run in self.runs.values():
            app = pb.AppIdentity()
            app.CopyFrom(run.app)
            app.ClearField("signer")
            app.ClearField("signature")
            nodes = sum(len(place.seats) for place in run.hosts())
            found.runs.add(
                run=run.run,
                app=app,
                owner=run.owner,
                opened_s=run.opened_s,
                partitions=run.partitions,
                nodes=nodes,
            )
        return found

    # ------------------------------------------------------------ workers

    def attends(self, worker: str, hello: pb.AppHello, now_s: float) -> list[Instruction]:
        """A worker that runs apps is here, or here again; what it may have missed is sent again."""
        self.attending[worker] = None
        for run in list(hello.runs)[:MAX_RUNS]:
            if run not in self.runs:
                self.held[worker, run] = now_s + HELD_S
        for found in self.runs.values():
            place = found.places.get(worker)
            if place is not None and found.run in hello.runs:
                for task in place.under_way.values():
                    self._tell(worker, pb.ToNode(task=task))
            elif place is not None:
                self._lose(found, place, "its app host restarted")
        self._offer_all()
        return self._done()

    def deserts(self, worker: str, reason: str) -> list[Instruction]:
        """The worker cannot be counted on any more: it died, left, or does something else."""
        for found in list(self.runs.values()):
            place = found.places.get(worker)
            if place is not None:
                self._lose(found, place, reason)
        return self._done()

    def stops_attending(self, worker: str) -> list[Instruction]:
        """Its stream for apps is gone and did not come back."""
        self.attending.pop(worker, None)
        return self.deserts(worker, "its connection for apps broke")

    def fleet_changed(self) -> list[Instruction]:
        """Somebody became idle, or joined."""
        self._offer_all()
        return self._done()

    def ready(self, worker: str, message: pb.AppReady) -> list[Instruction]:
        """The app is loaded there."""
        run, place = self._place(worker, message.run)
        if run is None or place is None:
            return self._done()
        if place.standing in (Standing.PREPARING, Standing.REFUSED):
            place.standing, place.refusal = Standing.READY, None
            place.capacity = max(1, min(message.nodes, MAX_NODES))
            if run.partitions:
                self._fill(run)
            else:
                self._tell_fleet(run)
        return self._done()

    def refused(self, worker: str, message: pb.AppRefused) -> list[Instruction]:
        """The app cannot or may not run there."""
        run, place = self._place(worker, message.run)
        if run is None or place is None:
            return self._done()
        refusal = pb.AppRefused(
            run=run.run,
            kind=message.kind,
            reason=clean(message.reason, REASON_CHARS, lines=True),
            worker=worker,
            name=self.view.name_of(worker),
        )
        if place.refusal == refusal:
            return self._done()
        if place.standing is Standing.NODE:
            self._lose(run, place, refusal.reason)
            place = run.places.setdefault(worker, Place(worker, Standing.REFUSED))
        place.standing, place.refusal = Standing.REFUSED, refusal
        self._say(Name.APP_REFUSED, run, "warning", worker=worker, reason=refusal.reason)
        if not run.partitions:
            self._tell_fleet(run)
        return self._done()

    def replied(
        self, worker: str, reply: pb.AppReply, holds: Callable[[int, str], bool]
    ) -> list[Instruction]:
        """A task's reply; ``holds(run, hash)``: whether that part is here. Late ones are dropped."""
        run, place = self._place(worker, reply.run)
        task = place.under_way.pop(reply.message, None) if place is not None else None
        if run is None or task is None:
            self._out.append(DropParts(reply.run, frozenset(p.hash for p in reply.parts), worker))
            return self._done()
        run.waiting.pop(reply.message, None)
        sent = {part.hash for part in task.parts}
        lost = [
            p.hash
            for p in reply.parts
            if not p.data and p.size and p.hash not in sent and not holds(run.run, p.hash)
        ]
        if lost:
            self._fail(run, reply.message, f"{len(lost)} arrays of the reply did not arrive")
        else:
            came = frozenset(p.hash for p in reply.parts if p.size and not p.data) - sent
            self._out.append(HandOver(run.run, worker, reply.message, came))
            if came:
                run.answered[reply.message] = worker
            self._out.append(TellOwner(run.run, pb.ToApp(reply=reply)))
        return self._done()

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed: owners that did not come back, runs that nobody opened again."""
        for run in list(self.runs.values()):
            if run.owner_gone_s is not None and now_s - run.owner_gone_s > OWNER_RETURNS_S:
                self.closed_quietly(run.run)
        for (worker, run_id), until_s in list(self.held.items()):
            if now_s > until_s:
                del self.held[worker, run_id]
                end = pb.AppEnd(run=run_id, reason="its owner did not come back")
                self._tell(worker, pb.ToNode(end=end))
        return self._done()

    def closed_quietly(self, run: int) -> None:
        """End a run whose owner is gone."""
        kept, self._out = self._out, []
        self._out = [*kept, *self.closed(run, f"its ServerApp was not heard of for {OWNER_RETURNS_S:.0f} s")]

    # ------------------------------------------------------------ helpers

    def _place(self, worker: str, run: int) -> tuple[Run | None, Place | None]:
        found = self.runs.get(run)
        return found, found.places.get(worker) if found is not None else None

    def _offer_all(self) -> None:
        for run in self.runs.values():
            if self._offer(run) and not run.partitions:
                self._tell_fleet(run)

    def _offer(self, run: Run) -> bool:
        """Offer the app to idle workers that do not know of it, while nodes are wanted."""
        if run.partitions and not run.free():
            return False
        new = [w for w in self.view.free() if w in self.attending and w not in run.places]
        for worker in new:
            run.places[worker] = Place(worker, Standing.PREPARING)
            self._tell(worker, pb.ToNode(offer=pb.AppOffer(run=run.run, app=run.app)))
        return bool(new)

    def _startable(self, run: Run) -> list[Place]:
        """Ready and idle, in join order."""
        places = (run.places.get(worker) for worker in self.view.free())
        return [p for p in places if p is not None and p.standing is Standing.READY]

    def _fill(self, run: Run) -> None:
        """Give the partitions of lost nodes to those that are ready, or may be more nodes."""
        if self._seat(run, [*self._startable(run), *run.hosts()]):
            self._tell_nodes(run)

    def _seat(self, run: Run, places: list[Place]) -> bool:
        """Deal free partitions: to each place those that it had, the others to whoever has the smallest share
        of its room, in this order; True when somebody got one."""
        new: dict[str, list[int]] = {}

        def give(place: Place, partition: int) -> None:
            place.seats[partition] = 0
            run.owned[partition] = place.worker
            new.setdefault(place.worker, []).append(partition)

        by_worker = {place.worker: place for place in places}
        for partition in run.free():
            owner = by_worker.get(run.owned.get(partition, ""))
            if owner is not None and len(owner.seats) < owner.capacity:
                give(owner, partition)
        for partition in [p for p in run.free() if not any(p in mine for mine in new.values())]:
            room = [place for place in places if len(place.seats) < place.capacity]
            if not room:
                break
            give(min(room, key=lambda place: len(place.seats) / place.capacity), partition)
        for worker, partitions in new.items():
            self._start(run, by_worker[worker], partitions)
        return bool(new)

    def _start(self, run: Run, place: Place, partitions: list[int]) -> None:
        """Tell a worker which nodes it is; ``partitions``: its new ones."""
        for partition in partitions:
            node = node_id(place.worker) if place.capacity == 1 else node_id(place.worker, partition + 1)
            place.seats[partition] = node
            run.where[node] = place.worker
        if place.standing is not Standing.NODE:
            place.standing = Standing.NODE
            self._out.append(Lend(place.worker, run.run))
        seats = [pb.AppSeat(node=node, partition=at) for at, node in sorted(place.seats.items())]
        start = pb.AppStart(run=run.run, seats=seats, partitions=run.partitions, run_config=run.config)
        self._tell(place.worker, pb.ToNode(start=start))

    def _lose(self, run: Run, place: Place, reason: str) -> None:
        """Take a worker out of a run; what it owed is answered with an error."""
        del run.places[place.worker]
        self._tell(place.worker, pb.ToNode(end=pb.AppEnd(run=run.run, reason=reason)))
        self._out.append(DropParts(run.run, None, place.worker))
        was_node = place.standing is Standing.NODE
        for node in place.seats.values():
            run.where.pop(node, None)
        if was_node:
            # Before the errors: who asks for the nodes after them must not find this one.
            self._tell_nodes(run)
        for message in place.under_way:
            run.waiting.pop(message, None)
            self._fail(run, message, f"{self.view.name_of(place.worker)} was lost: {reason}")
        if was_node:
            self._out.append(GiveBack(place.worker, run.run, reason))
            self._say(Name.APP_NODE_LOST, run, "warning", worker=place.worker, reason=reason)
            self._fill(run)
        elif not run.partitions:
            self._tell_fleet(run)

    def _fail(self, run: Run, message: str, reason: str) -> None:
        reply = pb.AppReply(run=run.run, message=message, error=NODE_UNAVAILABLE, reason=reason)
        self._out.append(TellOwner(run.run, pb.ToApp(reply=reply)))

    def _tell(self, worker: str, message: pb.ToNode) -> None:
        self._out.append(TellNode(worker, message))

    def _tell_fleet(self, run: Run) -> None:
        standings = [p.standing for p in run.places.values()]
        free = set(self.view.free())
        fleet = pb.AppFleet(
            workers=self.view.connected(),
            attending=len(self.attending),
            busy=sum(w not in free for w in self.attending),
            preparing=standings.count(Standing.PREPARING),
            ready=[self.view.name_of(p.worker) for p in self._startable(run)],
            refused=[p.refusal for p in run.places.values() if p.refusal is not None],
            nodes=sum(p.capacity for p in self._startable(run)),
        )
        self._out.append(TellOwner(run.run, pb.ToApp(fleet=fleet)))

    def _tell_nodes(self, run: Run) -> None:
        nodes = [
            pb.AppNode(node=node, worker=p.worker, name=self._name(p, node), partition=partition)
            for p in run.hosts()
            for partition, node in p.seats.items()
        ]
        nodes.sort(key=lambda node: node.partition)
        message = pb.ToApp(nodes=pb.AppNodes(nodes=nodes, partitions=run.partitions))
        self._out.append(TellOwner(run.run, message))

    def _name(self, place: Place, node: int) -> str:
        """A node's name for people: its worker's, with the partition where that is several."""
        name = self.view.name_of(place.worker)
        partition = next(at for at, mine in place.seats.items() if mine == node)
        return name if place.capacity == 1 else f"{name}#{partition}"

    def _say(self, event: Name, run: Run, level: str = "info", **fields: Any) -> None:
        self._out.append(Say(event, level, {"run": run.run, **fields}))

    def _done(self) -> list[Instruction]:
        done, self._out = self._out, []
        return done


def _same_owner(run: Run, request: pb.AppOpen) -> bool:
    """Return whether this may be the owner whose stream broke, or will soon be detected as broken."""
    same = run.app.hash == request.app.hash and hmac.compare_digest(run.key, request.key)
    return same and (run.owner_gone_s is not None or bool(run.key))
