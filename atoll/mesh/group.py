"""Processes that compute one stage, as their collectives see them; and bytes that each sends for these.

``Group`` is what a process calls; ``Processes`` is it over torch.distributed. Counted are the bytes that each
process sends by the usual algorithms (a ring), which ``volumes`` predicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.mesh.volumes import gathered_bytes, reduced_bytes, scattered_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Group(Protocol):
    """Collectives of ``size`` processes; every process calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all processes, in memory of its own; the same bits on each."""
        ...

    def maximum(self, value: Tensor) -> Tensor:
        """Return the elementwise maximum over all processes."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Return [size, ...] the parts of all processes, in their order."""
        ...

    def sum_parts(self, parts: Tensor) -> Tensor:
        """Return the sum over all processes of their ``parts[rank]``; ``parts`` is [size, ...]."""
        ...

    def pass_on(self, value: Tensor) -> Callable[[], Tensor]:
        """Begin to send a contiguous tensor to the next process of the ring; return the call that waits for
        that of the process before, of the same shape. Nobody may write into ``value`` until then."""
        ...


class Processes:
    """``Group`` over a process group of torch.distributed, with what its leader shares out and collects."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.sent_bytes = 0  # by this process, since it was last taken

    def sum(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.SUM)

    def maximum(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        found = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, op, group=self._group)
        self.sent_bytes += reduced_bytes(found.nbytes, self.size)
        return found

    def gather(self, part: Tensor) -> Tensor:
        part = part.detach().contiguous()
        found = part.new_empty((self.size, *part.shape))
        dist.all_gather_single(found.view(-1), part.reshape(-1), group=self._group)
        self.sent_bytes += gathered_bytes(found.nbytes, self.size)
        return found

    def sum_parts(self, parts: Tensor) -> Tensor:
        parts = parts.detach().contiguous()
        found = parts.new_empty(parts.shape[1:])
        dist.reduce_scatter_single(found.view(-1), parts.reshape(-1), group=self._group)
        self.sent_bytes += scattered_bytes(parts.nbytes, self.size)
        return found

    def pass_on(self, value: Tensor) -> Callable[[], Tensor]:
        sent, found = value.detach(), torch.empty_like(value)
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moving = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=ahead),
                dist.P2POp(dist.irecv, found, group=self._group, group_peer=behind),
            ]
        )
        self.sent_bytes += sent.nbytes

        def arrived() -> Tensor:
            for each in moving:
                each.wait()
            return found

        return arrived

    def broadcast(self, value: Tensor) -> Tensor:
        """Have everybody have the leader's value; in place."""
        dist.broadcast(value, 0, group=self._group)
        if self.rank == 0:
            self.sent_bytes += value.nbytes * (self.size - 1)
        return value

    def scatter(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """Have every process have its one of the leader's parts, in ``own``."""
        given = None if parts is None else [part.contiguous() for part in parts]
        dist.scatter(own, given, 0, group=self._group)
        if given is not None:
            self.sent_bytes += sum(part.nbytes for part in given[1:])
        return own

    def collect(self, part: Tensor) -> Tensor | None:
        """Return [size, ...] the parts of all processes at the leader, None elsewhere."""
        part = part.detach().contiguous()
        if self.rank:
            dist.gather(part, None, 0, group=self._group)
            self.sent_bytes += part.nbytes
            return None
        found = part.new_empty((self.size, *part.shape))
        dist.gather(part, list(found.unbind(0)), 0, group=self._group)
        return found

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)
