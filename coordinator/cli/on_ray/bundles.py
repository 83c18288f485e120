"""Resources of a node that one worker takes, as Ray counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import UsageError

MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the cluster, in Ray's own counts: what it was started with, used or not."""

    address: str
    cpus: float
    gpus: float
    memory_bytes: float  # that Ray gives out, without its object store


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one worker. ``memory_bytes`` 0: none is reserved, the worker looks what is free."""

    cpus: int
    gpus: int = 0
    memory_bytes: int = 0


def nodes_in(listed: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Return the living nodes of what ``ray.nodes()`` lists, by address."""
    found = [
        Node(
            str(each["NodeManagerAddress"]),
            float(each["Resources"].get("CPU", 0)),
            float(each["Resources"].get("GPU", 0)),
            float(each["Resources"].get("memory", 0)),
        )
        for each in listed
        if each["Alive"]
    ]
    return sorted(found, key=lambda node: node.address)


def whole_nodes(nodes: Sequence[Node]) -> list[Bundle]:
    """Return a bundle for each GPU with its share of the node's CPUs, and one for each node without GPUs."""
    found: list[Bundle] = []
    for node in nodes:
        if gpus := int(node.gpus):
            found += [Bundle(max(1, int(node.cpus) // gpus), 1)] * gpus
        elif cpus := int(node.cpus):
            found.append(Bundle(cpus))
    if not found:
        raise UsageError("no node of this Ray cluster has a CPU or GPU to give; start one with `ray start`")
    return found


def like_bundles(
    nodes: Sequence[Node], workers: int | None, cpus: int | None, gpus: int | None, memory_bytes: int = 0
) -> list[Bundle]:
    """Return bundles as asked: ``workers`` of them, default as many as the cluster has room for.

    CPUs default to 1, or to the GPUs' share of the smallest node that has so many. Workers on CPUs that
    leave room for another reserve their share of the memory, where ``memory_bytes`` does not say how much:
    each would else count on all that is free. UsageError where no node has so much.
    """
    able = [node for node in nodes if node.gpus >= (gpus or 0) and node.cpus >= (cpus or 1)]
    if not able:
        most = ", ".join(f"{node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in nodes) or "nothing"
        raise UsageError(
            f"no node has {cpus or 1} CPUs and {gpus or 0} GPUs for a worker: they have {most}; ask for less"
        )
    if cpus is None:
        cpus = min(max(1, int(node.cpus * gpus / node.gpus)) for node in able) if gpus else 1
    if not gpus and not memory_bytes and any(node.cpus >= 2 * cpus for node in able):
        memory_bytes = int(min(node.memory_bytes * cpus / node.cpus for node in able))
    room = sum(_fits(node, cpus, gpus or 0) for node in able)
    wanted = room if workers is None else workers
    if not 1 <= wanted <= MAX_WORKERS:
        raise UsageError(f"{wanted} workers; give --workers from 1 to {MAX_WORKERS}")
    return [Bundle(cpus, gpus or 0, memory_bytes)] * wanted


def widest(nodes: Sequence[Node], hosts: int) -> int:
    """Return the most CPUs that each of ``hosts`` equal bundles can have. UsageError where they have no room
    with one each."""
    for cpus in range(int(max((node.cpus for node in nodes), default=0)), 0, -1):
        if sum(_fits(node, cpus, 0) for node in nodes) >= hosts:
            return cpus
    total = sum(int(node.cpus) for node in nodes)
    raise UsageError(f"{hosts} hosts on a Ray cluster of {total} CPUs; give --hosts {max(1, total)} or fewer")


def _fits(node: Node, cpus: int, gpus: int) -> int:
    by_cpus = int(node.cpus // cpus)
    return min(by_cpus, int(node.gpus // gpus)) if gpus else by_cpus
