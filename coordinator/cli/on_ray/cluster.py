"""The part of Atoll that calls Ray: by its public API, and only where somebody asked for it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from atoll.errors import ConnectionFailed, UsageError
from coordinator.cli.on_ray.bundles import Bundle, Node, nodes_in
from coordinator.cli.on_ray.kept import LOOK_EVERY_S, Kept, Order

if TYPE_CHECKING:
    from types import ModuleType

CALLS_AT_ONCE = 8  # of one actor: a status is answered while somebody waits for an end
ANSWER_S = 5.0
LEAVE_S = 30.0  # a worker leaves within 7 s; a node may be slow or gone


class Cluster:
    """A Ray cluster that this process is connected to; made by ``connected``."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray

    def nodes(self) -> list[Node]:
        """Return the living nodes."""
        return nodes_in(self._ray.nodes())

    def address(self) -> str:
        """Return this machine's address, as the cluster's nodes reach it."""
        return str(self._ray.util.get_node_ip_address())

    def put(self, value: bytes) -> Any:
        """Store bytes for actors; they go with the last reference to them, and with this process."""
        return self._ray.put(value)

    def keep(
        self, name: str, order: Order, bundle: Bundle, group: Group | None = None, index: int = 0
    ) -> Any:
        """Start an actor that keeps a worker, and return its handle; it waits where nothing is free.

        It outlives this process, or stands at ``index`` of a ``group`` and ends with it. Ray starts it again,
        on another node too, however often its process or its node ends.
        """
        strategy: Any = "SPREAD"
        if group is not None:
            strategy = group.strategy(index)
        actor = self._ray.remote(Kept).options(
            name=name if group is None else None,
            lifetime="detached" if group is None else None,
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            memory=bundle.memory_bytes or None,
            max_restarts=-1,
            max_task_retries=0 if group is None else -1,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy=strategy,
        )
        return actor.remote(order)

    def group(self, bundles: Sequence[Bundle]) -> Group:
        """Reserve bundles all at once, or wait until all of them are free."""
        return Group(self._ray, bundles)

    def names(self) -> list[str]:
        """Return the names of the kept workers of this namespace."""
        return sorted(self._ray.util.list_named_actors(), key=lambda name: (len(name), name))

    def statuses(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return what each worker reports of itself; those that do not answer wait for room or a node."""
        asked = {name: self._call(name, "status") for name in names}
        refs = [ref for ref in asked.values() if ref is not None]
        done = set(self._ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S)[0]) if refs else set()
        found = []
        for name, ref in asked.items():
            row: dict[str, Any] = {"name": name, "state": "waiting for room"}
            if ref in done:
                try:
                    row |= self._ray.get(ref)
                except self._ray.exceptions.ActorUnavailableError:
                    row["state"] = "starting again"
                except self._ray.exceptions.RayError as error:
                    row |= {"state": "failed", "log": str(error).strip().splitlines()[-1][:1000]}
            found.append(row)
        return found

    def end(self, names: Sequence[str], remove: bool) -> list[str]:
        """Have workers leave and end their actors; returns the names of those that did not answer.
        ``remove``: their state goes too."""
        asked = {name: self._call(name, "leave", remove) for name in names}
        answering = {row["name"] for row in self.statuses(names) if "host" in row}
        refs = [asked[name] for name in names if name in answering]
        done = set(self._ray.wait(refs, num_returns=len(refs), timeout=LEAVE_S)[0]) if refs else set()
        for name in names:
            with suppress(ValueError):  # it is gone
                self._ray.kill(self._ray.get_actor(name), no_restart=True)
        self._await_gone(names)
        return [name for name in names if name not in answering or asked[name] not in done]

    def _await_gone(self, names: Sequence[str]) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        while set(names).intersection(self.names()):
            if time.monotonic() > deadline_s:
                raise ConnectionFailed("Ray has not ended all actors; look with `atoll ray status`")
            time.sleep(LOOK_EVERY_S)

    def _call(self, name: str, method: str, *given: Any) -> Any:
        """The reference to an actor's answer, None where there is no such actor."""
        try:
            return getattr(self._ray.get_actor(name), method).remote(*given)
        except ValueError:
            return None

    # ------------------------------------------------------------ one actor, by its handle

    def answered(self, reference: Any, timeout_s: float | None) -> bool:
        """True once a call has its answer, or failed."""
        return bool(self._ray.wait([reference], timeout=timeout_s)[0])

    def answer(self, reference: Any) -> Any:
        """Return a call's answer. ConnectionFailed where its actor is gone."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise ConnectionFailed(str(error).strip()) from None

    def kill(self, actor: Any) -> None:
        """End an actor, and with it the worker that it keeps."""
        self._ray.kill(actor, no_restart=True)


class Group:
    """Bundles that are reserved together. ``close`` gives them back and ends who stands in them."""

    def __init__(self, ray: ModuleType, bundles: Sequence[Bundle]) -> None:
        from ray.util import placement_group

        self._ray = ray
        # Those that a node's end freed are reserved again on others, and their actors started there.
        self._placed = placement_group([{"CPU": float(bundle.cpus)} for bundle in bundles], strategy="SPREAD")

    def ready(self, timeout_s: float) -> bool:
        """Wait so long for room; False where there is none yet."""
        return bool(self._placed.wait(timeout_s))

    def strategy(self, index: int) -> Any:
        """The place of one bundle, for Ray."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=index)

    def close(self) -> None:
        """Give the bundles back."""
        self._ray.util.remove_placement_group(self._placed)


@contextmanager
def connected(
    address: str, namespace: str, load: Callable[[], ModuleType] | None = None
) -> Iterator[Cluster]:
    """Connect to a running Ray cluster for the length of a block.

    ``address``: as ``ray.init`` takes it. UsageError where Ray is not installed or has another version than
    the cluster, ConnectionFailed where no cluster answers.
    """
    ray = (load or _ray)()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its tips for coming versions
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, TimeoutError) as error:
        why = str(error).strip().splitlines()[0][:300]
        raise ConnectionFailed(
            f"no Ray cluster at {address}: {why}; start one with `ray start --head`, or name it with --ray"
        ) from None
    except RuntimeError as error:  # another version of Ray or Python, most of all
        raise UsageError(f"cannot use the Ray cluster at {address}: {str(error).strip()[:600]}") from None
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _ray() -> ModuleType:
    try:
        import ray
        import ray.util
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed here; `pip install 'atoll[ray]'` here and on each node of "
            "the cluster"
        ) from None
    return ray
