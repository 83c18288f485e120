"""The process that sums a federated job's updates: it reads requests from its pipe and answers with events.

Both are what the scheduler and the shell exchange (``coordinator.messages``), in the journal's JSON; arrays
are files of the blob store, named by their hashes. It knows no network. What it writes lies in the store's
folder of partial blobs until the coordinator takes it in. It ends when its pipe does. torch is loaded here,
never in the coordinator's own process.

Before its answer it sends ``{"at": ...}`` of each piece of work that it begins: the client whose update it
takes, "" for anything else. So the coordinator knows what it died of, and that it still lives.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from atoll.errors import AtollError, BadFrame, StorageError
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.encoding import from_json, to_json
from protos.child_pipe import Gone, pipe_from

if TYPE_CHECKING:
    from coordinator.aggregation.central_evaluation import CentralEvaluation
    from coordinator.aggregation.server_half import ServerHalf, Written
    from coordinator.messages.instructions import HostSums

AT, KIND, VALUE, FILES = "at", "kind", "value", "files"
SECRET_BYTES = 32
OOM_SCORE = 500  # of 1000: short of memory, the system shall end this process before the coordinator's
Asked = do.OpenAggregator | do.AggregateRound | do.EvaluateModel
_KINDS = {kind.__name__: kind for kind in (*get_args(Asked), *get_args(ev.AggregatorEvent))}


def tagged(value: Asked | ev.AggregatorEvent) -> dict[str, Any]:
    """A request or an answer as it goes through the pipe."""
    return {KIND: type(value).__name__, VALUE: to_json(value)}


def untagged(message: dict[str, Any]) -> Any:
    """The request or answer that a message holds; BadFrame when it holds none."""
    try:
        return from_json(_KINDS[message[KIND]], message[VALUE])
    except (ValueError, TypeError, KeyError) as error:
        raise BadFrame(f"a message that is neither a request nor an answer: {error!r}") from None


class Aggregating:
    """Server half of a job, and its central evaluation once that is requested."""

    def __init__(
        self, folder: Path, url: str, scratch: Path, begins: Callable[[str], None] = lambda client: None
    ) -> None:
        """``folder``, ``url``: of the blobs; ``begins(client)`` is called before each piece of work."""
        self._folder, self._url, self._scratch = folder, url, scratch
        self._begins = begins
        self._half: ServerHalf | None = None
        self._central: CentralEvaluation | None = None
        self._files: list[Written] = []

    def answer(self, request: Asked) -> tuple[ev.AggregatorEvent, list[Written]]:
        """The event that answers a request, an error as well, and the files that are to become blobs."""
        self._files = []
        try:
            event = self._done(request)
        except StorageError as error:
            event = _failed(request, str(error), storage=True)
        except AtollError as error:
            event = _failed(request, str(error), hopeless=True)
        except Exception as error:  # noqa: BLE001 - the coordinator decides
            traceback.print_exc()
            event = _failed(request, f"{type(error).__name__}: {error}")
        if self._half is not None:
            self._half.rest()
        return event, self._files

    def _done(self, request: Asked) -> ev.AggregatorEvent:
        match request:
            case do.OpenAggregator():
                return self._open(request)
            case do.AggregateRound():
                return self._aggregate(request)
            case do.EvaluateModel():
                return self._evaluate(request)

    def _open(self, request: do.OpenAggregator) -> ev.AggregatorOpened:
        from coordinator.aggregation.server_half import ServerHalf
        from coordinator.storage.graph_store import GraphStore
        from coordinator.storage.mirrored_blobs import blob_store

        job, spec = request.job, request.spec
        blobs = blob_store(self._folder, self._url, reading=True)
        graphs = GraphStore(blobs).graphs(spec.dag_hash, spec.eval_dag_hash)
        for left in self._scratch.glob(f".aggregator-{job}-*.part"):
            left.unlink(missing_ok=True)  # of a process that was killed as it wrote
        half = ServerHalf(job, spec, graphs, blobs, self._scratch)
        model = self._blob(half.open(request.state, request.n_clients))
        self._half, self._central = half, None
        assert half.state is not None  # noqa: S101 - just opened
        assert model is not None  # noqa: S101 - just written
        up = tuple(half.update_metas.values())
        secret = secrets.token_hex(SECRET_BYTES)
        return ev.AggregatorOpened(job, half.state.round, model, graphs.train.inputs, up, secret)

    def _aggregate(self, request: do.AggregateRound) -> ev.Aggregated:
        from coordinator.aggregation.server_half import Offered

        begun = time.perf_counter()
        offered: dict[str, Offered | HostSums] = {
            name: Offered(
                update.update,
                update.n_samples,
                update.steps,
                request.n_samples[name],
                *request.codecs[name],
                update.scalars,
                update.metrics,
                request.weights.get(name, 1.0),
                request.bases.get(name, ""),
            )
            for name, update in request.updates.items()
        }
        found = self._opened.aggregate(
            request.round,
            {**offered, **request.sums},
            request.n_clients,
            request.least,
            self._begins,
            request.drawn,
            request.opening,
        )
        state, model, delta = map(self._blob, (found.state, found.model, found.delta))
        took_s = time.perf_counter() - begun
        return ev.Aggregated(
            request.job,
            request.round,
            request.attempt,
            state,
            model,
            delta,
            found.dropped,
            took_s,
            found.void,
        )

    def _evaluate(self, request: do.EvaluateModel) -> ev.CentrallyEvaluated:
        from coordinator.aggregation.central_evaluation import CentralEvaluation

        half = self._opened
        if self._central is None:
            self._central = CentralEvaluation(half.spec, half.graphs.evaluation, half._blobs)
        found = self._central.run(half.weights(), lambda: self._begins(""))
        return ev.CentrallyEvaluated(
            request.job, request.round, found.loss, dict(found.metrics), found.n_samples
        )

    @property
    def _opened(self) -> ServerHalf:
        if self._half is None:
            raise StorageError("asked to work before a job was opened")
        return self._half

    def _blob(self, file: Written | None) -> ev.Blob | None:
        if file is None:
            return None
        self._files.append(file)
        return ev.Blob(file.stored.hash, file.stored.size)


def _failed(
    request: Asked, reason: str, *, hopeless: bool = False, storage: bool = False
) -> ev.AggregatorEvent:
    if isinstance(request, do.EvaluateModel):
        return ev.CentrallyEvaluated(request.job, request.round, None, error=reason)
    return ev.AggregatorBroke(request.job, reason, hopeless, storage)


def main() -> None:
    """Entry: the pipe's descriptor, the blobs' folder and URL, and the folder to write to."""
    descriptor, folder, url, scratch = sys.argv[1:]
    pipe = pipe_from(int(descriptor))
    # Whatever is slow to load is loaded before the first round waits for it.
    import coordinator.aggregation.central_evaluation
    import coordinator.aggregation.server_half  # noqa: F401

    begins: Callable[[str], None] = lambda client: pipe.say({AT: client})  # noqa: E731
    aggregating = Aggregating(Path(folder), url, Path(scratch), begins)
    with contextlib.suppress(Gone):
        while True:
            event, files = aggregating.answer(untagged(pipe.hear()))
            pipe.say({**tagged(event), FILES: [str(file.path) for file in files]})


if __name__ == "__main__":
    main()
