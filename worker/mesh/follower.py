"""A process that follows: it makes each call that its leader tells it of, on its own part of the stage."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import protos.session  # noqa: F401 - codes of what an assignment holds
from atoll.errors import AtollError
from atoll.messages.to_worker import Assign
from protos import atoll_compute_pb2 as pb
from protos import coding
from protos.child_pipe import Gone, Pipe
from worker.machine.malloc import give_back, keep_no_tensors
from worker.machine.op_timing import warm_up
from worker.machine.torch_device import find_device, prepare, torch_device
from worker.mesh.handing import Handing
from worker.mesh.leader import probe
from worker.mesh.meeting import FollowersStore, joined
from worker.mesh.stage import MeshStage
from worker.stage import tensor_blobs
from worker.stage.assignment import assigned

if TYPE_CHECKING:
    from atoll.mesh.group import Processes

MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class _Choice:
    """``DeviceChoice`` of a follower."""

    device: str
    threads: int
    memory_bytes: int
    gpu_memory_bytes: int


class _Files:
    """Blobs that the leader has fetched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        return self._folder / name


class Orders:
    """What the leader says, read in a thread: orders wait for ``next``, answers go to who asked the board."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._waiting: queue.SimpleQueue[pb.ToFollower] = queue.SimpleQueue()
        self.store = FollowersStore(pipe.send)
        threading.Thread(target=self._read, name="atoll-orders", daemon=True).start()

    def next(self) -> pb.ToFollower:
        """Return the next order, once it has come."""
        return self._waiting.get()

    def _read(self) -> None:
        try:
            while True:
                message = self._pipe.receive(pb.ToFollower())
                if message.WhichOneof("body") == "answer":
                    self.store.answered(message.answer)
                else:
                    self._waiting.put(message)
        except (Gone, AtollError):
            os._exit(0)  # also where the others are waited for, who are gone with the leader


class Follower:
    """One process's life, which ends with its leader's."""

    def __init__(
        self, orders: Orders, setup: pb.FollowerSetup, processes: Processes, device: torch.device
    ) -> None:
        self._orders, self._processes, self._device = orders, processes, device
        self._blobs, self._scratch = _Files(Path(setup.blob_dir)), Path(setup.scratch_dir)
        self._stage: MeshStage | None = None

    def run(self) -> None:
        while True:
            message = self._orders.next()
            if message.WhichOneof("body") == "load":
                self._load(message.load)
            elif message.work.call == "drop":
                self._drop()
            elif message.work.call == "probe":
                probe(self._processes, self._device)
            elif self._stage is not None:
                self._stage.follow(message.work)
                if message.work.call == "apply":
                    give_back()

    def _drop(self) -> None:
        self._stage = None
        gc.collect()
        give_back()

    def _load(self, message: pb.MeshLoad) -> None:
        self._drop()
        work = assigned(coding.read(Assign, message.assign))
        handing, tensors = None, dict[str, dict[str, torch.Tensor]]()
        if message.handed:
            handing = Handing(self._processes, self._device, heard=self._orders.next)
        else:
            tensors = {
                name: tensor_blobs.load(self._blobs, name, work.tensors[name], state)
                for name, state in work.leaf_states.items()
            }
        self._stage = MeshStage(
            work, tensors, self._device, self._processes, None, self._scratch, handing=handing
        )


def serve(pipe: Pipe) -> None:
    """A follower's life: its setup is the pipe's first message. What fails is the leader's to report."""
    try:
        setup = pipe.receive(pb.ToFollower()).setup
        choice = _Choice(setup.device, setup.threads, setup.memory_bytes, setup.gpu_memory_bytes)
        device = find_device(choice)
        prepare(device, choice)
        keep_no_tensors()
        warm_up()
        gc.freeze()
        orders = Orders(pipe)
        found = pb.FollowerFound(
            model=device.model,
            memory_bytes=device.memory_bytes,
            memory_limit_bytes=device.memory_limit_bytes,
        )
        pipe.send(pb.FromFollower(found=found))
        at = orders.next().meeting
        store = Path(at.file) if at.file else orders.store
        processes = joined(store, at.rank, at.size, setup.interface)
        pipe.send(pb.FromFollower(ready=True))
        Follower(orders, setup, processes, torch_device(device)).run()
    except Gone:
        pass
    except Exception as error:  # noqa: BLE001 - any op may fail in its own way
        known = isinstance(error, AtollError)
        if not known:
            traceback.print_exc()
        with contextlib.suppress(Gone):
            reason = f"{'' if known else type(error).__name__ + ': '}{error}"
            pipe.send(pb.FromFollower(error=reason[:MAX_REASON]))
        os._exit(1)
    os._exit(0)
