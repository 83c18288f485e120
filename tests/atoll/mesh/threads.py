"""Processes of a mesh as threads of one: their collectives meet at a barrier, in the order of their ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from atoll.mesh.volumes import gathered_bytes, reduced_bytes, scattered_bytes
from tests.patience import HUNG_S

T = TypeVar("T")


class Meeting:
    """Where ``size`` threads lay down what each of them has."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=HUNG_S)
        self.values: list[Tensor | None] = [None] * size


class ThreadGroup:
    """``Group`` of one thread; counts bytes as ``atoll.mesh.group.Processes`` does."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self.sent_bytes = self.calls = 0

    def _meet(self, value: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.values[self.rank] = value.detach()
        meeting.barrier.wait()
        found = torch.stack([each for each in meeting.values if each is not None])
        meeting.barrier.wait()
        self.calls += 1
        return found

    def sum(self, value: Tensor) -> Tensor:
        self.sent_bytes += reduced_bytes(value.nbytes, self.size)
        return self._meet(value).sum(0, dtype=value.dtype)

    def maximum(self, value: Tensor) -> Tensor:
        self.sent_bytes += reduced_bytes(value.nbytes, self.size)
        return self._meet(value).amax(0)

    def gather(self, part: Tensor) -> Tensor:
        self.sent_bytes += gathered_bytes(part.nbytes * self.size, self.size)
        return self._meet(part)

    def sum_parts(self, parts: Tensor) -> Tensor:
        self.sent_bytes += scattered_bytes(parts.nbytes, self.size)
        return self._meet(parts).sum(0)[self.rank]

    def pass_on(self, value: Tensor) -> Callable[[], Tensor]:
        self.sent_bytes += value.nbytes
        found = self._meet(value)[self.rank - 1]
        return lambda: found


def together(size: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """``run`` in each of ``size`` threads; their results by rank. Raises what one of them raised."""
    meeting, results, errors = Meeting(size), dict[int, T](), list[Exception]()

    def one(rank: int) -> None:
        try:
            results[rank] = run(ThreadGroup(rank, meeting))
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
