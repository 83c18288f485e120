"""Output of both commands as files: help, status, plan, watch, errors, at 80 and 120 columns and in a pipe.

`python -m tests.coordinator.cli.golden` writes the files anew.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from rich.console import Console, RenderableType

from coordinator.cli import main as cli
from coordinator.cli.views.brief import brief_view
from coordinator.cli.views.render import plan_view, status_view, watch_line, watch_view
from hostos import command_line
from protos import atoll_control_pb2 as pb
from tests.coordinator.cli.test_main import _plan
from worker.cli import main as worker_cli

if TYPE_CHECKING:
    import typer

FOLDER = Path(__file__).with_name("golden_files")
REFRESH = "python -m tests.coordinator.cli.golden"
PIPE = 0  # as a width
WIDTHS = {"80": 80, "120": 120, "pipe": PIPE}
NAMES = {"w-1": "fast1", "w-2": "slow1", "w-3": "slow2"}
LOSSES = [5.5, 4.1, 3.3, 3.0, 2.8, 2.7, 2.6]
HELPS = {
    "help-atoll": (cli.app, ["-h"]),
    "help-atoll-worker": (worker_cli.app, ["-h"]),
    "help-join": (worker_cli.app, ["join", "-h"]),
    "help-join-all": (worker_cli.app, ["join", "--help-all"]),
    "help-submit": (cli.app, ["submit", "-h"]),
    "help-dev": (cli.app, ["dev", "-h"]),
}
ERRORS: tuple[tuple[typer.Typer, list[str]], ...] = (
    (cli.app, ["submt", "job.py"]),
    (cli.app, ["status", "--jsn"]),
    (cli.app, ["submit"]),
    (cli.app, ["new", "a b"]),
    (cli.app, ["plan", "none.py", "--fleet", "none.toml"]),
    (cli.app, ["status", "--coordinator", "127.0.0.1:9", "--token", "hello"]),
    (cli.app, ["status", "--coordinator", "nowhere"]),
    (cli.app, ["token", "create", "--expires", "soon"]),
    (cli.app, ["ca", "rotate", "--overlap", "long"]),
    (worker_cli.app, ["join", "--token", "atoll2_AAAA"]),
    (worker_cli.app, ["join", "127.0.0.1:9", "--token", "atoll1_AAAA"]),
    (worker_cli.app, ["join", "127.0.0.1:9", "--memory", "much"]),
    (worker_cli.app, ["limits", "--cpu", "200"]),
    (worker_cli.app, ["leave"]),
)


def status() -> pb.StatusReply:
    """A fleet of three with a job."""
    device = pb.DeviceFacts(kind="cpu", threads=2, memory_limit_bytes=3 << 30, own_memory_bytes=1 << 30)
    workers = [
        pb.WorkerStatus(worker="w-1", name="fast1", state="assigned", device=device, gflops=41.0, job="gpt-1",
                        stage=0, seen_s_ago=0.3, reason="holds stage 0"),
        pb.WorkerStatus(worker="w-2", name="slow1", state="assigned", device=device, gflops=9.0, job="gpt-1",
                        stage=1, seen_s_ago=0.2, reason="holds stage 1"),
        pb.WorkerStatus(worker="w-3", name="slow2", state="pool", device=device, gflops=8.0, stage=-1,
                        seen_s_ago=0.4, reason="it would slow the step from 1.5 s to 2.3 s"),
    ]  # fmt: skip
    links = [pb.LinkStatus(source="w-1", target="w-2", bandwidth_bps=8e6, latency_s=0.04, way="direct")]
    return pb.StatusReply(version="0.1.0", uptime_s=7500, workers=workers, jobs=[update(2)], links=links)


def update(stages: int) -> pb.JobUpdate:
    """A running job of so many stages."""
    held = [
        pb.StageStatus(stage=at, worker=f"w-{at + 1}", busy_share=0.9 - at / 10, forward_s=0.02,
                       backward_s=0.05, planned_bytes=30 << 20, measured_bytes=28 << 20,
                       replace_s=12.0, replace_why="slow2 takes it over")
        for at in range(stages)
    ]  # fmt: skip
    links = [
        pb.LinkRate(source=f"w-{at}", target=f"w-{at + 1}", bps=at * 2e6, measured_bps=8e6,
                    bytes_per_step=1 << 20, dense_bytes_per_step=4 << 20, codec="topk", ratio=8.0)
        for at in range(1, stages)
    ]  # fmt: skip
    return pb.JobUpdate(
        job="gpt-1", name="gpt", state="training", step=120, steps=500, loss=2.6, eval_loss=2.7,
        best_eval_loss=2.65, best_step=100, step_s=1.5, samples_per_s=42.0, eta_s=570.0, stages=held,
        links=links, reason="training with plan 1", exchange="",
        loss_now="if a worker is lost now: 6 s (4 steps) are done again, from step 116",
    )  # fmt: skip


def federated() -> pb.JobUpdate:
    """A running federated job."""
    figure = pb.Figure(name="accuracy", value=0.91)
    rounds = pb.FederatedStatus(
        strategy="fedavg", data="readings", arrived=3, chosen=5, bytes_up=12 << 20, bytes_down=30 << 20,
        clients_loss=0.4, clients_metrics=[figure], central_loss=0.38, central_metrics=[figure], round_s=4.0,
    )  # fmt: skip
    return pb.JobUpdate(
        job="health-1", name="health", state="training", step=7, steps=20, loss=0.42, eta_s=52.0, step_s=4.0,
        reason="round 8 of 20: 5 clients train", federated=rounds,
    )  # fmt: skip


VIEWS: dict[str, Callable[[], RenderableType]] = {
    "status": lambda: status_view(status()),
    "status-empty": lambda: status_view(pb.StatusReply(version="0.1.0", uptime_s=5)),
    "plan": lambda: plan_view(_plan(), NAMES),
    "watch": lambda: brief_view(update(2), LOSSES, NAMES),
    "watch-many": lambda: brief_view(update(9), LOSSES, NAMES),
    "watch-federated": lambda: brief_view(federated(), LOSSES, NAMES),
    "watch-all": lambda: watch_view(update(2), LOSSES, NAMES),
}
LINES = {"watch": lambda: watch_line(update(2)), "watch-federated": lambda: watch_line(federated())}


def printed(view: RenderableType, width: int) -> str:
    """A view as a console shows it."""
    text = io.StringIO()
    Console(
        file=text, width=width or None, height=50, force_terminal=bool(width), color_system=None,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    ).print(view, soft_wrap=not width)  # fmt: skip
    return _trimmed(text.getvalue())


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@contextmanager
def columns(width: int) -> Iterator[None]:
    """A terminal so wide, or a pipe, without a home of a user's."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("ATOLL_", "FORCE_", "PY_C"))
    }
    wanted = {**kept, "HOME": "/nonexistent", "TERM": "dumb", **({"COLUMNS": str(width)} if width else {})}
    if not width:
        wanted.pop("COLUMNS", None)
    consoles = (command_line.out, command_line.err)
    with patch.dict(os.environ, wanted, clear=True):
        before = [console.width for console in consoles]
        for console in consoles:
            console.width = width or 80
        try:
            yield
        finally:
            for console, was in zip(consoles, before, strict=True):
                console.width = was


def ran(app: typer.Typer, words: list[str]) -> tuple[str, int]:
    """What a command prints, and its exit code."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        code = command_line.run(app, list(words))
    return _trimmed(text.getvalue()), code


def errors() -> str:
    """Each wrong command line with its answer."""
    parts = []
    for app, words in ERRORS:
        text, code = ran(app, words)
        parts.append(f"$ {app.info.name} {' '.join(words)}\n{text}(exit code {code})\n")
    return "\n".join(parts)


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Each file's name, and what makes its text."""
    for width_name, width in WIDTHS.items():
        for name, view in VIEWS.items():
            line = LINES.get(name) if width == PIPE else None
            if line is not None:
                yield f"{name}.{width_name}", lambda line=line: f"{line()}\n"  # type: ignore[misc]
            elif width != PIPE or not name.startswith("watch"):
                yield f"{name}.{width_name}", lambda view=view, width=width: printed(view(), width)  # type: ignore[misc]
        for name, (app, words) in HELPS.items():
            if width != PIPE:  # the same as at 80
                yield f"{name}.{width_name}", lambda app=app, words=words: ran(app, words)[0]  # type: ignore[misc]
        yield f"errors.{width_name}", errors


def made(name: str, make: Callable[[], str]) -> str:
    """The text of a file."""
    with columns(WIDTHS[name.rpartition(".")[2]]):
        return make()


def main() -> None:
    """Write every file anew."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for name, make in cases():
        (FOLDER / f"{name}.txt").write_text(made(name, make))


if __name__ == "__main__":
    main()
