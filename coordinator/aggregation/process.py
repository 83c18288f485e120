"""The process that sums a federated job's updates: told what to do on its standard input, in JSON.

A message is a length (u32, little-endian) and that many bytes of JSON, at most ``MAX_MESSAGE_BYTES``;
arrays are files of the blob store, named by their hashes. It knows no network. What it writes lies in
the store's folder of partial blobs until the coordinator takes it in. It ends when its input does.
torch is loaded here, never in the coordinator's own process.

Before its reply it says ``{"at": ...}`` of each piece of work that it begins: the client whose update
it takes, "" for anything else. So the coordinator knows what it died of, and that it still lives.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from atoll.errors import AtollError, BadFrame, StorageError

if TYPE_CHECKING:
    from coordinator.aggregation.central_evaluation import CentralEvaluation
    from coordinator.aggregation.server_half import ServerHalf, Written

MAX_MESSAGE_BYTES = 64 << 20
LENGTH = struct.Struct("<I")
OPEN, AGGREGATE, EVALUATE = "open", "aggregate", "evaluate"
AT = "at"
OOM_SCORE = 500  # of 1000: short of memory, the system shall end this process before the coordinator's


def frame(message: Mapping[str, Any]) -> bytes:
    """A message as it goes through a pipe; BadFrame beyond the bound."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise BadFrame(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES}")
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """The length that ``head`` announces; BadFrame beyond the bound."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise BadFrame(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES}")
    return int(length)


def parsed(body: bytes) -> dict[str, Any]:
    """A message's content; BadFrame when it is no JSON object."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise BadFrame(f"a message that is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadFrame(f"a message that is a {type(found).__name__}")
    return found


class Aggregating:
    """Server half of a job, and its central evaluation once that is requested."""

    def __init__(self, begins: Callable[[str], None] = lambda client: None) -> None:
        """``begins(client)`` is called before each piece of work."""
        self._begins = begins
        self._half: ServerHalf | None = None
        self._central: CentralEvaluation | None = None

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one message; an error is one too."""
        work = {OPEN: self._open, AGGREGATE: self._aggregate, EVALUATE: self._evaluate}
        begun = time.perf_counter()
        try:
            reply = work[message["what"]](message)
        except StorageError as error:
            reply = {"error": str(error), "hopeless": False, "storage": True}
        except AtollError as error:
            reply = {"error": str(error), "hopeless": True}
        except Exception as error:  # noqa: BLE001 - said to the coordinator, which decides
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}", "hopeless": False}
        if self._half is not None:
            self._half.rest()
        return {**reply, "took_s": time.perf_counter() - begun}

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from atoll.job import JobSpec
        from coordinator.aggregation.server_half import ServerHalf
        from coordinator.storage.graph_store import GraphStore
        from coordinator.storage.mirrored_blobs import blob_store
        from protos.convert import decode

        spec = decode(JobSpec, base64.b64decode(message["spec"]))
        blobs = blob_store(Path(message["blobs"]), message["blobs_url"], reading=True)
        graphs = GraphStore(blobs).graphs(spec.dag_hash, spec.eval_dag_hash)
        for left in Path(message["scratch"]).glob(f".aggregator-{message['job']}-*.part"):
            left.unlink(missing_ok=True)  # of a process that was killed as it wrote
        half = ServerHalf(message["job"], spec, graphs, blobs, Path(message["scratch"]))
        model = half.open(message["state"], int(message["n_clients"]))
        self._half, self._central = half, None
        assert half.state is not None  # noqa: S101 - just opened
        return {
            "round": half.state.round,
            "model": _written(model),
            "inputs": {name: [meta.dtype, list(meta.shape)] for name, meta in graphs.train.inputs.items()},
            "up": [[meta.dtype, list(meta.shape)] for meta in half.update_metas.values()],
        }

    def _aggregate(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from coordinator.aggregation.server_half import Offered
        from coordinator.messages.instructions import HostSums

        offered: dict[str, Offered | HostSums] = {
            **{client: Offered(**told) for client, told in message["updates"].items()},
            **{host: HostSums(**told) for host, told in message["sums"].items()},
        }
        found = self._opened.aggregate(
            int(message["round"]),
            offered,
            int(message["n_clients"]),
            int(message["least"]),
            self._begins,
            message["drawn"],
        )
        return {
            "state": _written(found.state),
            "model": _written(found.model),
            "delta": _written(found.delta),
            "dropped": dict(found.dropped),
        }

    def _evaluate(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from coordinator.aggregation.central_evaluation import CentralEvaluation

        half = self._opened
        if self._central is None:
            self._central = CentralEvaluation(half.spec, half.graphs.evaluation, half._blobs)
        found = self._central.run(half.weights(), lambda: self._begins(""))
        return {"loss": found.loss, "metrics": dict(found.metrics), "n_samples": found.n_samples}

    @property
    def _opened(self) -> ServerHalf:
        if self._half is None:
            raise StorageError("asked to work before a job was opened")
        return self._half


def _written(file: Written | None) -> dict[str, Any] | None:
    if file is None:
        return None
    return {"path": str(file.path), "hash": file.stored.hash, "size": file.stored.size}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer messages until the input ends."""

    def say(message: Mapping[str, Any]) -> None:
        replies.write(frame(message))
        replies.flush()

    aggregating = Aggregating(lambda client: say({AT: client}))
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        body = requests.read(body_length(head))
        say(aggregating.answer(parsed(body)))


def main() -> None:
    """The process: nothing but replies goes to the standard output that it was given."""
    with contextlib.suppress(OSError):  # other systems have no such file
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # Whatever is slow to load is loaded before the first round waits for it.
        import coordinator.aggregation.central_evaluation
        import coordinator.aggregation.server_half  # noqa: F401

        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
