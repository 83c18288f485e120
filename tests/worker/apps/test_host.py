"""A worker's apps against a coordinator that does not keep the rules: consent, names, odd figures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import HUNG_S

pytest.importorskip("flwr")

from atoll.errors import BadFrame
from hostos.command_line import run
from protos import atoll_apps_pb2 as pb
from protos.app_bundle import Bundle, make_bundle
from protos.app_signing import make_key, sign
from worker.apps import run as app_run
from worker.apps.context import AppContext
from worker.apps.host import AppHost, _check_names
from worker.apps.run import HostedRun
from worker.apps.store import AppStore
from worker.blobs import BlobCache
from worker.cli import main as cli
from worker.config import WorkerConfig

PROJECT = """
[project]
name = "app"
version = "1"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""


class Parts:
    """Everything is here already."""

    def __init__(self, folder: Path, bundle: Bundle) -> None:
        self.cache = BlobCache(folder, 1 << 30)
        self.cache.path(bundle.hash).write_bytes(bundle.data)

    def fetch(self, run: int, wanted: Mapping[str, int], cancel: Any) -> int:
        return 0

    def take(self, parts: Any) -> int:
        return 0

    def send(self, run: int, files: Mapping[str, Path], cancel: Any) -> int:
        return 0

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Started(Exception):
    """The app's code would run now."""


class Hosted:
    """One run on a worker whose owner accepted what the test says."""

    def __init__(
        self,
        folder: Path,
        code: str = "client = print\n",
        store: AppStore | None = None,
        more: str = "",
        packages: str = "",
    ) -> None:
        """``more`` of its pyproject; ``packages``: where this worker's owner has wheels."""
        source = folder / "source"
        source.mkdir()
        (source / "pyproject.toml").write_text(PROJECT + more)
        (source / "app.py").write_text(code)
        self.bundle = make_bundle(source)
        self.store = store or AppStore(folder / "state")
        self.said: list[pb.FromNode] = []
        self._heard = threading.Condition()
        config: Any = SimpleNamespace(
            state_dir=folder / "state", threads=0, node_config=(), app_env=(), app_nodes=1,
            app_packages=packages, app_packages_bytes=1 << 20,
        )  # fmt: skip
        self.rooms: list[str] = []
        context = AppContext(
            config, self.store, self.store.accepts, self._send, lambda: 1, lambda: self.rooms.append("made")
        )
        app = pb.AppIdentity(hash=self.bundle.hash, size=len(self.bundle.data), client="app:client")
        parts: Any = Parts(folder / "parts", self.bundle)
        self.run = HostedRun(pb.AppOffer(run=5, app=app), parts, context)

    def _send(self, message: pb.FromNode) -> None:
        with self._heard:
            self.said.append(message)
            self._heard.notify_all()

    def until(self, wanted: Callable[[pb.FromNode], bool]) -> pb.FromNode:
        with self._heard:
            assert self._heard.wait_for(lambda: any(map(wanted, self.said)), HUNG_S)
            return next(filter(wanted, self.said))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[pb.ChildSetup]:
    """Processes that would have run the app."""
    found: queue.SimpleQueue[pb.ChildSetup] = queue.SimpleQueue()

    def never(setup: pb.ChildSetup, threads: int, said: Callable[[str], None], shown: Any) -> None:
        found.put(setup)
        raise BadFrame("no process in this test")

    monkeypatch.setattr(app_run, "AppProcess", never)
    return found


@pytest.fixture
def hosted(tmp_path: Path, started: queue.SimpleQueue[pb.ChildSetup]) -> Iterator[Hosted]:
    made = Hosted(tmp_path)
    yield made
    made.run.end("the test is over")
    made.run.join(HUNG_S)


def test_no_message_makes_a_worker_run_what_its_owner_did_not_accept(
    hosted: Hosted, started: queue.SimpleQueue[pb.ChildSetup]
) -> None:
    refused = hosted.until(lambda m: m.HasField("refused")).refused
    assert refused.kind == pb.APP_REFUSAL_NOT_ACCEPTED
    hosted.run.start(pb.AppStart(run=5, seats=[pb.AppSeat(node=9)]))
    hosted.run.task(pb.AppTask(run=5, message="m", left_s=30.0))
    reply = hosted.until(lambda m: m.HasField("reply")).reply
    assert (reply.message, reply.error) == ("m", app_run.APP_CRASHED)
    assert "not accepted" in reply.reason
    assert started.empty()
    assert hosted.rooms == []


def test_room_is_made_once_an_app_is_accepted_and_before_its_code_is_loaded(
    hosted: Hosted, started: queue.SimpleQueue[pb.ChildSetup]
) -> None:
    hosted.until(lambda m: m.HasField("refused"))
    assert hosted.rooms == []
    hosted.store.accept(hosted.bundle.hash)
    hosted.run.consent_changed()
    started.get(timeout=HUNG_S)
    assert hosted.rooms == ["made"]


def test_a_task_without_end_and_a_failing_disk_leave_the_run_answering(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted.until(lambda m: m.HasField("refused"))

    def full(task: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hosted.run._parts, "take", full)
    hosted.run.task(pb.AppTask(run=5, message="full", left_s=float("inf")))
    assert "No space" in hosted.until(lambda m: m.reply.message == "full").reply.reason
    monkeypatch.undo()
    hosted.run.task(pb.AppTask(run=5, message="next", left_s=float("nan")))
    hosted.until(lambda m: m.reply.message == "next")


def test_an_app_whose_files_changed_after_they_were_accepted_is_not_started(
    hosted: Hosted, started: queue.SimpleQueue[pb.ChildSetup]
) -> None:
    hosted.until(lambda m: m.HasField("refused"))
    folder = hosted.store.code_dir(hosted.bundle.hash)
    hosted.store.accept(hosted.bundle.hash)
    hosted.run.consent_changed()
    started.get(timeout=HUNG_S)
    (folder / "app.py").chmod(0o600)
    (folder / "app.py").write_text("client = input\n")
    # Every start looks, not only the first: the run was loaded and its process has died.
    hosted.run._standing = pb.FromNode(ready=pb.AppReady(run=5))
    hosted.run.task(pb.AppTask(run=5, message="m", left_s=30.0))
    reply = hosted.until(lambda m: m.HasField("reply")).reply
    assert (reply.message, reply.error) == ("m", app_run.APP_CRASHED)
    assert "'app.py' was changed" in reply.reason
    assert started.empty()


def test_an_app_that_nobody_accepted_is_one_inert_file_that_can_be_read_until_it_is_refused(
    hosted: Hosted, started: queue.SimpleQueue[pb.ChildSetup], capsys: pytest.CaptureFixture[str]
) -> None:
    hosted.until(lambda m: m.HasField("refused"))
    state, name = hosted.store.root.parent, hosted.bundle.hash
    files = [path for path in hosted.store.root.rglob("*") if path.is_file() and path.suffix != ".json"]
    assert [path.name for path in files if path.name != "lock"] == [f"{name}.bundle"]
    assert files[0].stat().st_mode & 0o111 == 0
    here = ["--state-dir", str(state)]
    assert run(cli.app, ["apps", "show", name[:12], *here]) == 0
    assert "app.py" in capsys.readouterr().out
    assert run(cli.app, ["apps", "show", name[:12], "app.py", *here]) == 0
    assert "client = print" in capsys.readouterr().out
    assert run(cli.app, ["apps", "refuse", name[:12], *here]) == 0
    assert not [path for path in hosted.store.root.rglob("*") if path.suffix in (".bundle", ".py")]
    hosted.run.consent_changed()
    hosted.run.task(pb.AppTask(run=5, message="m", left_s=30.0))
    assert "not accepted" in hosted.until(lambda m: m.reply.message == "m").reply.reason
    assert started.empty()


def test_an_apps_files_are_unpacked_once_it_is_accepted_and_go_when_that_is_taken_back(
    hosted: Hosted, started: queue.SimpleQueue[pb.ChildSetup]
) -> None:
    hosted.until(lambda m: m.HasField("refused"))
    hosted.store.accept(hosted.bundle.hash)
    hosted.run.consent_changed()
    started.get(timeout=HUNG_S)
    folder = hosted.store.code_dir(hosted.bundle.hash)
    assert sorted(path.name for path in folder.iterdir()) == ["app.py", "pyproject.toml"]
    assert hosted.store.offers.read(hosted.bundle.hash) is None
    hosted.store.revoke(hosted.bundle.hash)
    assert not folder.exists()


def test_two_apps_never_share_state_whatever_number_their_runs_have(
    hosted: Hosted, started: queue.SimpleQueue[pb.ChildSetup], tmp_path: Path
) -> None:
    hosted.until(lambda m: m.HasField("refused"))
    hosted.store.accept(hosted.bundle.hash)
    hosted.run.consent_changed()
    hosted.run.start(pb.AppStart(run=5, seats=[pb.AppSeat(node=9)]))
    other = tmp_path / "other"
    other.mkdir()
    second = Hosted(other, "client = input\n", hosted.store)
    second.until(lambda m: m.HasField("refused"))
    second.store.accept(second.bundle.hash)
    second.run.consent_changed()
    # Each is awaited: a run that is ended starts no process.
    folders = {Path(started.get(timeout=HUNG_S).runs_dir) for _ in range(2)}
    assert {folder.name for folder in folders} == {hosted.bundle.hash, second.bundle.hash}


def test_a_worker_accepts_for_its_own_life_a_hash_a_publisher_or_any_app(tmp_path: Path) -> None:
    publisher = make_key(tmp_path / "lab.key")
    apps = [pb.AppIdentity(hash=name * 64) for name in ("a", "b", "c")]
    apps[1].signer, apps[1].signature = sign(tmp_path / "lab.key", apps[1].hash)
    apps[2].signer, apps[2].signature = apps[1].signer, apps[1].signature  # of another app

    def accepted(*given: str) -> list[bool]:
        config = WorkerConfig("h", state_dir=tmp_path, allow_apps=True, accept_apps=given)
        return [AppHost(config)._accepts(app) for app in apps]

    assert accepted() == [False, False, False]
    assert accepted("a" * 64) == [True, False, False]
    assert accepted(publisher) == [False, True, False]
    assert accepted("any") == [True, True, True]
    assert accepted() == [False, False, False]


def test_a_run_of_another_app_is_refused_while_its_number_is_taken(tmp_path: Path) -> None:
    host = AppHost(SimpleNamespace(state_dir=tmp_path, app_cache_bytes=1 << 20))
    said: list[pb.FromNode] = []
    host._send = said.append  # type: ignore[method-assign]
    greeted: list[str] = []
    host._runs[5] = SimpleNamespace(app="a" * 64, greet=lambda: greeted.append("a"))  # type: ignore[assignment]
    for name in ("a", "b"):
        host._offered(pb.AppOffer(run=5, app=pb.AppIdentity(hash=name * 64)))
    assert greeted == ["a"]
    [message] = said
    assert "run 5 is one of another app here, aaaaaaaaaaaaaaaa" in message.refused.reason


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("offer", pb.AppOffer(app=pb.AppIdentity(hash="../../etc"))),
        ("task", pb.AppTask(message="m", parts=[pb.Part(hash="/tmp/x", size=1)])),
        ("task", pb.AppTask(message="../x")),
        ("task", pb.AppTask(message="m" * 101)),
        ("forget", pb.AppForget(hashes=["../" * 9 + "home/me/.ssh/id"])),
        ("forget", pb.AppForget(message="a/b")),
    ],
)
def test_names_that_would_lead_elsewhere_are_refused(kind: str, body: Any) -> None:
    with pytest.raises(BadFrame):
        _check_names(kind, body)


def test_names_that_the_coordinator_uses_are_taken() -> None:
    _check_names("offer", pb.AppOffer(app=pb.AppIdentity(hash="a" * 64)))
    _check_names("task", pb.AppTask(message="0f" * 16, parts=[pb.Part(hash="a" * 64)]))
    _check_names("forget", pb.AppForget(hashes=["a" * 64], message=""))
