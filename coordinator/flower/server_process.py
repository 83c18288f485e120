"""The process that a ServerApp runs in, on its owner's machine: one a run, started by `atoll flower run`.

It opens the run, waits for its nodes while the app is imported, calls the app with our Grid, and
tells its parent what happens, one JSON object a line. When the parent is gone, so is it, and the
run ends on the workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from atoll.errors import AtollError, JobFailed, NoWorkers, UsageError
from coordinator.client.endpoint import Endpoint
from coordinator.flower.grid import CoordinatorGrid, Tell
from coordinator.flower.readiness import Verdict, judge
from coordinator.flower.replies import metrics_shown
from coordinator.flower.stream import AppLink
from hostos.budget import Budget
from hostos.command_line import INTERRUPTED
from protos import atoll_apps_pb2 as pb
from protos import flower_content as content
from protos import flower_internals as flower
from protos.app_bundle import make_bundle
from protos.child_pipe import Gone, pipe_from
from protos.credentials import JoinToken
from protos.text_limits import clean

MAX_TRACE_CHARS = 4000
MAX_REASON_CHARS = 8000
MAX_LOG_CHARS = 8000  # of one line of Flower's
WAITING_LINES, WAITING_LINES_PER_S = 30, 0.5
SAID_CHARS, SAID_CHARS_PER_S = 256_000, 10_000.0  # of the app's own log lines
FEWER = "start more workers, or let the app need fewer (min_available_nodes, fraction or --run-config)"
KEY_BYTES = 16
ENDS_WITHIN_S = 2.0  # an app whose run was ended; then its process is


class Progress(logging.Handler):
    """Reads rounds and metrics off the strategy's own log lines, and passes on what the app itself logs."""

    def __init__(self, tell: Tell, folder: Path, shows_lines: bool) -> None:
        """``shows_lines``: Flower's log prints every line already."""
        super().__init__(logging.INFO)
        self._tell, self._folder, self._shows_lines = tell, str(folder.resolve()), shows_lines
        self._lines = Budget(SAID_CHARS, SAID_CHARS_PER_S)
        self._history = False  # what follows is a legacy run's, its only word on distributed losses

    def emit(self, record: logging.LogRecord) -> None:
        """Tell the parent of a round that begins, of metrics, or of a line of the app's own."""
        found = flower.progress_of(record)
        kind: str = found[0] if found is not None else ""
        value: Any = found[1] if found is not None else ()
        match kind:
            case "round":
                self._tell("round", {"round": value[0], "rounds": value[1]})
            case "waiting":
                words = f"the app waits for {value[1]} nodes, {value[0]} take part"
                self._tell("waiting", {"reason": f"{words}; {FEWER}"})
            case "clients" | "server" if value:
                self._tell("metrics", {"of": kind, "metrics": metrics_shown(value)})
            case "summary":
                self._history = True
            case "":
                self._said(record)

    def _said(self, record: logging.LogRecord) -> None:
        own = self._history or Path(record.pathname).is_relative_to(self._folder)
        if self._shows_lines or not own or record.levelno > logging.INFO:  # warnings are printed anyhow
            return
        line = clean(record.getMessage(), MAX_LOG_CHARS)
        if line.strip() and self._lines.take(time.monotonic(), len(line)):
            self._tell("said", {"line": line})


class Bounded(logging.Formatter):
    """Flower's own lines, cut: a strategy logs all metrics that its nodes named."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """The line as Flower formats it, its beginning."""
        return self._inner.format(record)[:MAX_LOG_CHARS]


class Host:
    """One run of one ServerApp."""

    def __init__(self, setup: dict[str, Any], tell: Tell) -> None:
        self._setup, self._tell = setup, tell
        self._run: int = setup["run"]
        self._config: dict[str, Any] = setup["run_config"]
        self._changed = threading.Condition()
        self._verdict: Verdict | None = None
        self._waiting = Budget(WAITING_LINES, WAITING_LINES_PER_S)
        self._begin: pb.AppBegin | None = None
        self._nodes: pb.AppNodes | None = None
        self._failure: AtollError | None = None
        app = setup["app"]
        signed = {name: bytes.fromhex(app[name]) for name in ("signer", "signature")}
        identity = pb.AppIdentity(**{**app, **signed})
        info = flower.run_of(self._run, identity.name, identity.version, identity.hash, self._config)
        self.grid = CoordinatorGrid(self._run, info, tell)
        token = JoinToken.decode(setup["token"]) if setup["token"] else None
        endpoint = Endpoint(setup["host"], setup["port"], token, setup["use_proxy"])
        bundle = make_bundle(Path(setup["folder"]))
        if bundle.hash != identity.hash:
            raise UsageError(f"files of {setup['folder']} changed while they were read; try again")
        opening = pb.AppOpen(
            run=self._run, app=identity, bundle=bundle.data, key=secrets.token_bytes(KEY_BYTES)
        )
        self.link = AppLink(endpoint, opening, self._received, self._reopened, self._lost)
        self.grid.use(self.link)
        self._identity = identity

    def execute(self) -> None:
        """Run the app to its end. Raises what stopped it."""
        self.link.start()
        app = self._load()
        self._gather()
        log = logging.getLogger(flower.LOG_NAME)
        for handler in log.handlers:
            handler.setFormatter(Bounded(handler.formatter or logging.Formatter()))
        log.addHandler(Progress(self._tell, Path(self._setup["folder"]), self._setup["show_log"]))
        flower.take_identity(self._run, flower.SERVER_NODE)
        context = Context(
            run_id=self._run,
            node_id=flower.SERVER_NODE,
            node_config={},
            state=RecordDict(),
            run_config=dict(self._config),
        )
        self._tell("started", {})
        try:
            app(self.grid, context)
        except AtollError:
            raise
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - the app's errors are shown
            if self._failure is not None:
                raise self._failure from None
            raise JobFailed(f"the ServerApp raised {_words(failure)}") from None

    def _load(self) -> Any:
        """Import the ServerApp. UsageError with the traceback's end when that fails."""
        reference = self._setup["server"]
        if packages := self._setup["packages"]:
            sys.path.append(packages)  # last: it takes the place of nothing
        try:
            app = flower.find_app(reference, Path(self._setup["folder"]))
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - anything may go wrong in foreign code
            raise UsageError(f"the ServerApp {reference} cannot be loaded: {_words(failure)}") from None
        if not callable(app):
            raise UsageError(f"{reference} is {type(app).__name__}, no ServerApp")
        return app

    def _gather(self) -> None:
        """Wait for the nodes. NoWorkers says who is missing and why."""
        until_s = time.monotonic() + self._setup["wait_s"]
        with self._changed:
            while self._nodes is None:
                if self._failure is not None:
                    raise self._failure
                verdict = self._verdict
                left_s = until_s - time.monotonic()
                over = left_s <= 0 or (verdict is not None and verdict.hopeless)
                if verdict is not None and verdict.settled and not verdict.nodes and over:
                    raise NoWorkers(clean(verdict.reason, MAX_REASON_CHARS, lines=True))
                waits = verdict is not None and verdict.settled and not verdict.nodes
                self._changed.wait(left_s if waits else None)
        listed = [{"name": n.name, "worker": n.worker, "partition": n.partition} for n in self._nodes.nodes]
        self._tell("nodes", {"nodes": listed})

    # ------------------------------------------------------------ from the link

    def _received(self, message: pb.ToApp) -> None:
        match message.WhichOneof("body"):
            case "fleet":
                self._judge(message.fleet)
            case "nodes":
                self.grid.nodes_changed(message.nodes)
                with self._changed:
                    again, self._nodes = self._nodes is not None, message.nodes
                    self._changed.notify_all()
                if again:
                    count = len(message.nodes.nodes)
                    self._tell("fleet", {"nodes": count, "partitions": message.nodes.partitions})
            case "reply":
                self.grid.replied(message.reply)

    def _judge(self, fleet: pb.AppFleet) -> None:
        if self._begin is not None:
            # Restarted, the coordinator asks anew; who had which partition keeps it.
            again = pb.AppBegin()
            again.CopyFrom(self._begin)
            again.keep.extend(self._nodes.nodes if self._nodes is not None else ())
            if self._nodes is not None or fleet.nodes >= again.nodes:
                self.link.say(pb.FromApp(begin=again))
            return
        verdict = judge(fleet, self._setup["nodes"], self._identity.hash, self._setup["own"])
        if verdict.nodes:
            config = {key: content.value_to_proto(value) for key, value in self._config.items()}
            self._begin = pb.AppBegin(nodes=verdict.nodes, run_config=config)
            self.link.say(pb.FromApp(begin=self._begin))
        with self._changed:
            known = self._verdict is not None and self._verdict.reason == verdict.reason
            self._verdict = verdict
            self._changed.notify_all()
        # However often workers change their mind: the last word is in the error, or nodes follow.
        if not known and self._waiting.take(time.monotonic()):
            self._tell("waiting", {"reason": clean(verdict.reason, MAX_REASON_CHARS, lines=True)})

    def _reopened(self) -> None:
        self._tell("reconnected", {})
        self.grid.reopened()

    def _lost(self, error: AtollError) -> None:
        self.grid.fail(error)
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        if isinstance(
            error, JobFailed
        ):  # ended by the coordinator: an app that asks for nothing must end too
            timer = threading.Timer(ENDS_WITHIN_S, self._end, (error,))
            timer.daemon = True
            timer.start()

    def _end(self, error: AtollError) -> None:
        self._tell("failed", {"kind": type(error).__name__, "reason": str(error)})
        os._exit(error.exit_code)


def _words(failure: BaseException) -> str:
    trace = "".join(traceback.format_exception(failure))
    return f"{type(failure).__name__}: {failure}\n{trace[-MAX_TRACE_CHARS:]}"


def main() -> None:
    """Entry: the socket's descriptor is the only argument."""
    parent = pipe_from(int(sys.argv[1]))
    hosts: list[Host] = []

    def tell(event: str, figures: dict[str, Any]) -> None:
        parent.say({"event": event, **figures})

    def stop_with_parent() -> None:
        with contextlib.suppress(AtollError, Gone):
            parent.hear()  # which says nothing more
        for host in hosts:
            host.link.close("its owner interrupted it")
        os._exit(INTERRUPTED)

    code = 0
    try:
        hosts.append(Host(parent.hear(), tell))
        threading.Thread(target=stop_with_parent, name="atoll-app-parent", daemon=True).start()
        hosts[0].execute()
        hosts[0].link.close("its ServerApp has ended")
        tell("done", {})
    except AtollError as error:
        for host in hosts:
            host.link.close(f"its ServerApp failed: {type(error).__name__}")
        tell("failed", {"kind": type(error).__name__, "reason": str(error)})
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the app must not hold up the end


if __name__ == "__main__":
    main()
