"""What a compute process says: each message is checked, and passed on or acted on."""

from __future__ import annotations

import json
import re
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import BadFrame, UsageError
from atoll.messages.from_worker import MAX_REASON_CHARS
from hostos.budget import Budget
from protos import atoll_compute_pb2 as pb
from protos.text_limits import clean
from worker.hosting.contained.limits import descendants, resident_bytes
from worker.hosting.neighbours.connecting import connect
from worker.hosting.requests import of_assignment
from worker.machine.own_share import RESERVE_BYTES, held_bytes, main_share
from worker.machine.speed_file import MAX_BYTES as MAX_SPEEDS_BYTES
from worker.session import events, pipe, wire

if TYPE_CHECKING:
    from protos import atoll_control_pb2 as control
    from worker.cancel import Cancel
    from worker.hosting.contained.child import Child
    from worker.hosting.held import HostState, Now

log = structlog.get_logger()

SAID = frozenset({"spans", "log", "codec_speeds"})
"""Messages to the coordinator that a compute process sends by itself."""
MESSAGE_COST = 1000  # bytes, beside its own
LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception"})
BURST, PER_S = 1 << 20, 64 << 10  # characters
EVENT = re.compile(r"[a-z][a-z_.]{0,60}")


class ChildLog:
    """Prints what is not too much; the rest is left out."""

    def __init__(self) -> None:
        self._budget = Budget(BURST, PER_S)

    def write(self, m: pb.ComputeLog) -> None:
        """Print an event. Raises BadFrame for what is none."""
        if m.level not in LEVELS or not EVENT.fullmatch(m.event):
            raise BadFrame("an event of no kind in the log")
        if not self._budget.take(time.monotonic(), len(m.fields_json) + 100):
            return
        try:
            fields: dict[str, Any] = json.loads(m.fields_json)
        except (ValueError, RecursionError):
            raise BadFrame("an event with damaged fields in the log") from None
        if not isinstance(fields, dict):
            raise BadFrame("an event without fields in the log")
        shown = {
            clean(key, 60): value
            if isinstance(value, int | float | bool)
            else clean(str(value), 8000, lines=True)
            for key, value in fields.items()
            if key not in ("event", "level")
        }
        getattr(log, "error" if m.level == "exception" else m.level)(m.event, **shown)


class Hearing:
    """Hears the process of a compute host, in the process's own thread."""

    def __init__(self, state: HostState) -> None:
        self._state, self._log = state, ChildLog()

    def heard(self, child: Child, m: pb.FromCompute) -> None:
        """Take a message of ``child``. Raises BadFrame for what breaks a rule."""
        with self._state.lock:
            now = self._state.now
        if now is None or now.child is not child:
            return
        served = now.served
        if served is None:
            raise BadFrame("it spoke before it was spoken to")
        left_over = now.loading != now.assigned  # the blocks that it read then are free already
        if m.freed and now.gate is not None and not left_over:
            now.gate.freed(m.freed)
        if left_over and of_assignment(m):
            return served.left_over(m)
        match m.WhichOneof("body"):
            case "ready":
                self._heard_ready(now, m.ready)
            case "loading":
                now.loading = m.loading
            case "applied" | "said" if not now.most.take(time.monotonic(), m.ByteSize() + MESSAGE_COST):
                raise BadFrame("it says more than any job has to say")
            case "said" if m.said.WhichOneof("body") in SAID:
                self._heard_message(now, m.said)
            case "applied" | "said":
                self._heard_report(now, pipe.report_of(m))
            case "wanted" if now.gate is not None:
                now.gate.want(m.wanted.messages)
            case "outgoing":
                self._send(now, m.outgoing)
            case "connect":
                served.start(m.connect.request, self._connect)
            case "forget" if now.gate is not None:
                self._state.ports.network.forget(now.gate.job, m.forget.plan_version or None)
            case "fetch":
                served.fetch(m.fetch)
            case "store":
                served.store(m.store)
            case "near":
                served.fetch_near(m.near)
            case "lend":
                held = self._state.held
                served.lend(m.lend, "" if held is None else held.gateway)
            case "batches":
                held = self._state.held
                rows = held.rows if held is not None and not m.batches.batches.evaluation else None
                served.batches(m.batches, held.job if held is not None else "", rows)
            case "cancel":
                served.cancel(m.cancel)
            case "codec_speeds" if len(m.codec_speeds) <= MAX_SPEEDS_BYTES:
                self._state.speeds.write(m.codec_speeds)
            case "log":
                self._log.write(m.log)
            case "pong":
                now.answered_s = time.monotonic()

    def _heard_ready(self, now: Now, ready: pb.ComputeReady) -> None:
        if now.ready:
            raise BadFrame("it was ready before")
        with self._state.changed:
            now.ready, now.answered_s = True, time.monotonic()
            if ready.error:
                self._state.failed = UsageError(clean(ready.error, MAX_REASON_CHARS))
            else:
                before = self._state.device
                try:
                    self._bound(now, ready.device)
                except UsageError as error:
                    self._state.failed = error
                if before is not None and now.joined and self._state.ranks is not None:
                    self._state.device = (
                        before  # a federated round is this host's alone; the site is as it was
                    )
                elif before is not None and before.processes != ready.device.processes:
                    self._resized(now, before.processes, ready.device.processes)
            self._state.rates = list(ready.codec_speeds)
            self._state.changed.notify_all()
        log.debug("compute.ready", took_s=round(ready.took_s, 2))

    def _bound(self, now: Now, device: control.DeviceFacts) -> None:
        """Bound what a job may add to a process that is idle and ready; the lock is held. UsageError where
        the owner's limit leaves nothing for a stage, of which the first process alone speaks."""
        state, launched = self._state, now.child.launched
        first = not state.own_bytes
        own = held_bytes() // state.config.parts + resident_bytes(descendants(launched.pid)) + RESERVE_BYTES
        found, state.device = state.device, device  # its memory may be another than that of the one before
        if first:
            state.own_bytes = own if device.kind == "cpu" else device.own_memory_bytes // state.apart
        share = state.memory_under()
        main = share if device.kind == "cpu" else main_share(state.config, share, own)
        if first:
            state.device = found  # until it is known to do
            share.checked()
            main.checked()
            state.device = device
        alone = state.apart if state.ranks is not None else 1
        launched.limit_added(max(0, main.stage_bytes // alone))
        most = max(0, share.stage_bytes)
        now.child.send(pb.ToCompute(memory_limit=most))

    def _resized(self, now: Now, before: int, processes: int) -> None:
        """A site goes on with fewer processes than before, or with more: plans count on what it has now. What
        it was given meanwhile was planned for what it had; the lock is held."""
        log.warning("site.resized", before=before or 1, processes=processes or 1)
        self._state.ports.resized()
        if now.assigned and (before or 1) > (processes or 1):
            reason = f"this site goes on with {processes or 1} of {before} processes"
            self._state.report(reason, gone=True)

    def _heard_report(self, now: Now, report: events.Report) -> None:
        ports = self._state.ports
        with self._state.lock:
            held = self._state.held
            if isinstance(report, events.OpsProbed):
                if report.request not in self._state.probes:
                    return  # nobody asked
                self._state.probes.remove(report.request)
            elif held is None or getattr(report, "job", "") != held.job:
                return  # of a job that was dropped meanwhile
            elif held.turn == pipe.turn_over(report):
                held.turn = ""
            if held is not None and held.standby and isinstance(report, events.StepApplied):
                self._state.energy.begin(*now.counters)  # it is not credited
                if now.gate:
                    now.gate.step_over(report.step + 1)
        if isinstance(report, events.StepReady | events.UpdateReady):
            report = replace(report, energy_j=self._state.energy.taken(*now.counters))
        if isinstance(report, events.StepReady):
            now.watch.step_done(time.monotonic())
            report = wire.measured(report, ports.network.goodput(), ports.beside_s())
        ports.post(report)

    def _heard_message(self, now: Now, message: control.FromWorker) -> None:
        kind = message.WhichOneof("body") or ""
        held = self._state.held
        if kind != "codec_speeds" and (held is None or getattr(message, kind).job != held.job):
            return  # of a job that was dropped meanwhile
        if not now.said.take(time.monotonic(), message.ByteSize() + MESSAGE_COST):
            return
        if kind == "codec_speeds":
            self._state.rates = list(message.codec_speeds.speeds)
        self._state.ports.send(message)

    def _send(self, now: Now, m: pb.Outgoing) -> None:
        block = now.child.outgoing.block(m.offset, m.size)
        weakref.finalize(block, now.child.freed, m.offset, m.size).atexit = False
        if now.gate is not None:
            now.gate.send(m, block)

    def _connect(self, cancel: Cancel, _: object) -> int:
        state = self._state
        connect(state.links, state.ports.network, state.config.peer_timeout_s, cancel)
        return 0
