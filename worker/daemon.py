"""The worker process: joins, keeps this machine's identity and manners, and has each of its devices serve.

A device is a worker of its own (``worker.member``), with a thread, a session and a compute process; one
certificate, one port, one cache and one set of limits are the machine's. The first device lives as long as
the process.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import ConnectionFailed
from hostos.allotted import WORKER_THREADS, check_threads
from hostos.descriptors import enough, raise_limit
from hostos.signals import endings, heeded
from worker.blobs import BlobCache
from worker.config import WorkerConfig, make_config, remember
from worker.control.address_watch import watch_address
from worker.control.enroll import join
from worker.control.renewal import Renewal
from worker.machine.device import machine_memory, memory_limit
from worker.machine.lent import lent_devices
from worker.machine.malloc import keep_chunk_memory
from worker.machine.sensors.conditions import MachineConditions
from worker.manners.activity import Activity
from worker.manners.applied import read_applied
from worker.manners.keeper import Keeper, Manners
from worker.manners.verdict import Conditions
from worker.member import AddressChanged, ConsentChanged, MannersChanged, Member
from worker.session import events
from worker.shared import Shared

if TYPE_CHECKING:
    from protos.credentials import Identity
    from worker.ranks.gathering import Gathering

log = structlog.get_logger()

DESCRIPTORS = 4096  # that this process would hold open at most: peers, blobs, what knocks at its port
LEAVES_WITHIN_S = 2.0  # as is promised; a signal that comes later ends the process at once


class Daemon:
    """A worker, from joining to leaving. ``run`` once, in the main thread."""

    def __init__(
        self, config: WorkerConfig, conditions: Conditions | None = None, ranks: Gathering | None = None
    ) -> None:
        """``conditions``: of this machine; None: as its system tells them. ``ranks``: the other hosts of a
        site. UsageError for devices that cannot be lent."""
        self._config = config
        self._free_bytes = memory_limit(0, *machine_memory(), "this machine")
        devices = lent_devices(config, self._free_bytes)
        self._shared = Shared(config, len(devices), ranks)
        self._stopping = self._shared.stopping
        self._members = [Member(device, self._shared) for device in devices]
        self._broken: BaseException | None = None
        self._begun = False
        self._keeper = Keeper(
            config.state_dir,
            conditions or MachineConditions(),
            self._change_manners,
            lambda: self._shared.traffic.today,
            self._checked_memory,
        )

    def run(self) -> None:
        """Join, work, leave. Raises the error that ended it; returns after a wish to leave."""
        # Before the first thread of many: who has an arena of its own keeps it.
        keep_chunk_memory()
        enough(raise_limit(DESCRIPTORS))
        check_threads(WORKER_THREADS)
        restore = self._catch_signals()
        try:
            for member in self._members:
                member.prepare()
            self._shared.membership = join(self._config, self._stopping.wait)
            self._serve()
        except ConnectionFailed:
            if not self._stopping.is_set():
                raise
        finally:
            self._stopping.set()
            self._keeper.stop()
            self._together([member.close for member in self._members])
            restore()
        error = self._members[0].end or self._broken
        if error is not None:
            raise error

    def leave(self, reason: str) -> None:
        """Go as soon as possible; from any thread, not from a signal's handler."""
        self._stopping.set()
        for member in self._members:
            member.post(events.LeaveAsked(reason))

    def activity(self) -> Activity | None:
        """What the machine does now, None until it has joined; from any thread."""
        if not hasattr(self._shared, "membership") or not self._begun:
            return None
        first, traffic = self._members[0], self._shared.traffic
        sent, received = traffic.totals
        return Activity(
            coordinator=self._config.entry_address,
            devices=tuple(replace(member.activity, name=member.name) for member in self._members),
            memory=str(first.memory_under(self._config)),
            threads=first.device.threads,
            sent_bytes=sent,
            received_bytes=received,
            today_bytes=traffic.today[1],
            manners=self._keeper.manners,
        )

    def _serve(self) -> None:
        config, shared, members = self._config, self._shared, self._members
        shared.cache = BlobCache(config.blob_dir, config.cache_bytes)
        shared.renewal = Renewal(config, lambda: shared.membership, self._renewed)
        for member in members:
            member.enter()
        for member in members:
            member.start()
        if self._stopping.is_set():  # a device whose start was given up has no facts
            return
        remember(config)
        manners = self._begin_keeping()
        moved = partial(self._post, AddressChanged())
        watching = (config.host, config.port, moved, self._stopping.wait)
        for name, run, arguments in (
            ("atoll-address", watch_address, watching),
            ("atoll-renewal", shared.renewal.keep, (self._stopping.wait,)),
        ):
            threading.Thread(target=run, args=arguments, name=name, daemon=True).start()
        shared.trust(shared.membership)
        for number, member in enumerate(members):
            member.begin(self._part(number, manners))
        self._begun = True
        others = [
            threading.Thread(target=self._serve_other, args=(member,), name=member.name, daemon=True)
            for member in members[1:]
        ]
        for thread in others:
            thread.start()
        members[0].serve()
        if others and not self._stopping.is_set():  # it was dismissed
            self.leave("the machine's first device has left")
        for thread in others:
            thread.join(config.leave_timeout_s)  # it says goodbye

    def _serve_other(self, member: Member) -> None:
        """Thread: a further device. One that is dismissed alone leaves alone."""
        try:
            member.serve()
        except BaseException as error:
            log.exception("device.failed", worker=member.name)
            self._broken = error
            self.leave("a device failed")
            return
        if not self._stopping.is_set():
            member.close()

    @staticmethod
    def _together(what: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=run, name="atoll-close", daemon=True) for run in what[1:]]
        for thread in threads:
            thread.start()
        what[0]()
        for thread in threads:
            thread.join()

    def _post(self, event: AddressChanged | ConsentChanged) -> None:
        for member in self._members:
            member.post(event)

    def _renewed(self, identity: Identity) -> None:
        """Use a new identity for every connection from now on; those that are open stay."""
        shared = self._shared
        with shared.lock:
            before = shared.membership.identity
            shared.membership = replace(shared.membership, identity=identity)
        for member in self._members:
            member.renewed(key=before is None or before.key_pem != identity.key_pem)

    # ---------------------------------------------------------------- a guest's manners

    def _begin_keeping(self) -> Manners:
        """Take up what holds already, before the coordinator hears of this worker."""
        applied = read_applied(self._config.state_dir)
        if applied is not None:
            self._shared.traffic.resume(applied.day, applied.day_bytes)
        self._keeper.look()
        self._keeper.start()
        return self._keeper.manners

    def _change_manners(self, manners: Manners) -> None:
        """The keeper's thread, or this one at the first look."""
        self._shared.traffic.limit(manners.limits.upload_mbit, manners.limits.download_mbit)
        for number, member in enumerate(self._members):
            member.post(MannersChanged(self._part(number, manners)))

    def _part(self, number: int, manners: Manners) -> Manners:
        """The manners of one device."""
        machine = replace(
            self._config, memory_bytes=manners.memory_bytes, gpu_memory_bytes=manners.gpu_memory_bytes
        )
        part = lent_devices(machine, self._free_bytes)[number]
        return replace(manners, memory_bytes=part.memory_bytes, gpu_memory_bytes=part.gpu_memory_bytes)

    def _checked_memory(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Budgets of memory and GPU memory in the settings, bytes. UsageError for what is not there."""
        config = make_config({"state_dir": self._config.state_dir, "host": self._config.host}, {})
        _, total = machine_memory()
        machine = replace(
            self._config, memory_bytes=config.memory_bytes, gpu_memory_bytes=config.gpu_memory_bytes
        )
        parts = lent_devices(machine, self._free_bytes)
        for member, part in zip(self._members, parts, strict=True):
            device = member.device
            member.memory_under(part).checked()
            if device.kind != "cpu":
                memory_limit(config.gpu_memory_bytes, 0, device.memory_bytes, "this GPU")
            memory_limit(
                config.memory_bytes, 0, device.memory_bytes if device.kind == "cpu" else total, "this machine"
            )
        return config.memory_bytes, config.gpu_memory_bytes

    def _catch_signals(self) -> Callable[[], None]:
        """Leave on Ctrl+C, SIGTERM or when the terminal closes, and end at once on another signal where that
        hangs; returns what puts the old handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        begun_s = math.inf

        def leave(number: int) -> None:
            nonlocal begun_s
            if time.monotonic() - begun_s > LEAVES_WITHIN_S:
                os._exit(128 + number)  # without a word: whoever hangs may hold the log's lock
            begun_s = min(begun_s, time.monotonic())
            self.leave(f"stopped by {signal.Signals(number).name}")

        return heeded(
            {
                **{number: partial(leave, number) for number in endings()},
                # `atoll-worker apps` and `jobs` say so that its owner has spoken.
                signal.SIGUSR1: lambda: self._post(ConsentChanged()),
            }
        )
