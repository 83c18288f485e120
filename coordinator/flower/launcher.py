"""Starting a ServerApp's process, hearing what it says, and ending it: the parent's side of a run."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import grpc

from atoll import errors
from atoll.errors import AtollError, BadFrame, JobFailed
from coordinator.client.endpoint import Endpoint
from protos import atoll_apps_pb2 as pb
from protos import atoll_apps_pb2_grpc as rpc
from protos.app_bundle import Bundle, ConfigValue
from protos.child_pipe import Gone
from protos.child_process import ChildProcess, with_packages

LEAVE_WITHIN_S = 1.4  # from Ctrl+C to the end of the ServerApp's process
_END_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What to run. ``nodes`` 0: all workers that accepted the app; ``wait_s`` for those that lack."""

    folder: Path
    bundle: Bundle
    config: Mapping[str, ConfigValue]
    nodes: int = 0
    wait_s: float = 0.0
    show_log: bool = False
    signed: tuple[bytes, bytes] = (b"", b"")  # by whom, and the signature
    run: int = 0  # its number; 0: drawn when it starts
    own: int = 0  # workers that were started for it
    packages: str = ""  # where what the app brings is installed from; "": nothing is


class AppCommand:
    """One run as a child process; use it in ``with``, so that it never outlives the command."""

    def __init__(
        self, endpoint: Endpoint, wish: Wish, output: IO[Any] | int | None = None, packages: str = ""
    ) -> None:
        """``output``: where what the app prints goes instead of to standard output; ``packages``: a folder
        that the process appends to its path."""
        self.run = wish.run or new_run()
        self._endpoint, self._packages = endpoint, packages
        self._child = ChildProcess(
            ("-m", "coordinator.flower.server_process"), _environment(wish.show_log), stdout=output
        )
        with contextlib.suppress(Gone):  # one that died at once is seen by its silence
            self._child.pipe.say(self._setup(wish))

    def _setup(self, wish: Wish) -> dict[str, Any]:
        spec, bundle, endpoint = wish.bundle.spec, wish.bundle, self._endpoint
        return {
            "run": self.run,
            "folder": str(wish.folder.resolve()),
            "server": spec.server,
            "packages": self._packages,
            "run_config": dict(wish.config),
            "nodes": wish.nodes,
            "own": wish.own,
            "wait_s": wish.wait_s,
            "show_log": wish.show_log or "FLWR_LOG_LEVEL" in os.environ,
            "host": endpoint.host,
            "port": endpoint.port,
            "use_proxy": endpoint.use_proxy,
            "token": endpoint.token.encode() if endpoint.token is not None else "",
            "app": {
                "hash": bundle.hash,
                "size": len(bundle.data),
                "name": spec.name,
                "version": spec.version,
                "publisher": spec.publisher,
                "client": spec.client,
                "signer": wish.signed[0].hex(),
                "signature": wish.signed[1].hex(),
            },
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """What happens, until the app has ended. Raises what ended it, JobFailed when it crashed."""
        done = False
        with contextlib.suppress(Gone):
            while True:
                try:
                    event = self._child.pipe.hear()
                except BadFrame as error:
                    raise JobFailed(f"the ServerApp's process sent {error}") from None
                if event["event"] == "failed":
                    raise failure_of(event["kind"], event["reason"])
                done = done or event["event"] == "done"
                yield event
        ending = self._child.ending()
        if not done:
            raise JobFailed(f"the ServerApp's process ended with {ending}; what it printed says more")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the run and its process, at once where it does not end by itself."""
        process = self._child.process
        self._child.pipe.finish()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_WITHIN_S)
        orderly = process.poll() is not None and process.returncode >= 0
        self._child.end()  # and what it may have started
        if not orderly:
            self._end_run()

    def _end_run(self) -> None:
        """Say for a process that died that its run is over."""
        with contextlib.suppress(grpc.RpcError, AtollError), self._endpoint.channel() as channel:
            request = pb.AppClose(run=self.run, reason="its ServerApp died")
            rpc.AppsStub(channel).EndRun(request, metadata=self._endpoint.metadata(), timeout=_END_TIMEOUT_S)


def new_run() -> int:
    """Draw the number of a run."""
    return secrets.randbits(62) | 1


def failure_of(kind: str, text: str) -> AtollError:
    """The error that a run's process reported by its class's name."""
    found = getattr(errors, kind, JobFailed)
    return found(text) if isinstance(found, type) and issubclass(found, AtollError) else JobFailed(text)


def _environment(show_log: bool) -> dict[str, str]:
    quiet = {} if show_log or "FLWR_LOG_LEVEL" in os.environ else {"FLWR_LOG_LEVEL": "WARNING"}
    off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    return with_packages({**os.environ, **off, **quiet})
