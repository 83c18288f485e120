"""Options that several `atoll` commands share, and what is shown of their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import click
import typer
from rich.text import Text

from atoll.errors import UsageError
from atoll.job import MAX_STANDBYS
from coordinator.client.client import Client, connect
from hostos.command_line import AsJson, TokenFile, err, given_token

if TYPE_CHECKING:
    from atoll.job import Job

EXIT_CODES = """Exit codes: 0 done, 1 other error, 2 wrong usage or job file, 3 model cannot be captured,
4 no plan for this fleet, 5 coordinator unreachable, 6 access denied, 7 protocol mismatch,
8 job failed, 9 storage, 10 damaged message, 130 interrupted."""

StateDir = Annotated[
    Path | None,
    typer.Option(envvar="ATOLL_STATE", help="State folder; default ~/.local/state/atoll."),
]
UseProxy = Annotated[
    bool,
    typer.Option(
        "--use-proxy",
        envvar="ATOLL_USE_PROXY",
        help="Connect through the environment's proxy (https_proxy); default: directly.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: loopback experiments only.", hidden=True)]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace", help="Show the whole traceback if the job file raises an exception.", hidden=True
    ),
]


@dataclass(frozen=True)
class Common:
    """Options of every command that calls the coordinator."""

    PANEL: ClassVar = "Common options"

    coordinator: Annotated[
        str | None,
        typer.Option("--coordinator", envvar="ATOLL_COORDINATOR", metavar="HOST:PORT",
                     help="Address of the coordinator; default: the one in the state folder."),
    ] = None  # fmt: skip
    token: Annotated[
        str | None,
        typer.Option(envvar="ATOLL_TOKEN", help="The owner's token, if it is not in the state folder."),
    ] = None
    token_file: TokenFile = None
    state_dir: StateDir = None
    insecure: Insecure = False
    json: AsJson = False

    def client(self) -> Client:
        """The client that the options name; close it, or use it in ``with``."""
        root = click.get_current_context().find_root()
        use_proxy = bool(root.params.get("use_proxy"))
        token = given_token(self.token, self.token_file)
        return connect(self.coordinator, token, self.state_dir, insecure=self.insecure, use_proxy=use_proxy)


@dataclass(frozen=True)
class TokenCopies:
    """Files for others on the coordinator's machine, who are not to see its state folder."""

    PANEL: ClassVar = "Tokens"

    join_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the join token to this file, for workers that read it with --token-file. It "
            "holds no address: `atoll-worker join HOST:PORT --token-file FILE`.",
        ),
    ] = None
    owner_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the owner's token to this file.")
    ] = None


@dataclass(frozen=True)
class JobOptions:
    """Options of the commands that read a job file and plan for it."""

    PANEL: ClassVar = "Plan and training"

    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps; same as --set steps=N.")
    ] = None
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Override a job field, e.g. optimizer.lr=3e-4; may be repeated.",
        ),
    ] = None
    partitioner: Annotated[
        str,
        typer.Option(
            help="op_fence, one_piece (one piece of the model per device), proportional or even.", hidden=True
        ),
    ] = "op_fence"
    schedule: Annotated[str, typer.Option(help="auto, gpipe, 1f1b or zero-bubble.", hidden=True)] = "auto"
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Compression of links: off, lossless, auto[:RATIO], adatopk[:RATIO] or "
            "CODEC[:RATIO]; same as --set compress=HOW.",
        ),
    ] = None
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Replicas of the pipeline, which divide a step and exchange gradients: a number, or auto "
            "for the number predicted to be fastest; same as --set replicas=N. Default: 1.",
        ),
    ] = None
    exchange: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="How replicas exchange: exact; mean:CODEC, such as mean:int8_block (gradients in a codec); "
            "another gradient rule, such as acp_sgd:16 or gtopk:100. Or a rule with local steps in between, "
            "such as diloco, diloco:int8_block, diloco:auto (the codec that the links need) or saps. "
            "With auto the planner chooses among exact ways and local steps; same as "
            "--set exchange=HOW. Default: exact.",
        ),
    ] = None
    local_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="H",
            help="Local steps of a machine between two exchanges, if --exchange uses local steps; same as "
            "--set local_steps=H. Default: that of the rule, such as 50 for diloco.",
            hidden=True,
        ),
    ] = None
    quorum: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="PEERS",
            help="Number of peers that a round of local steps waits for; a late peer stops after its "
            "current step, and contributes the steps that it has taken. Same as --set quorum=PEERS. "
            "Default: all.",
            hidden=True,
        ),
    ] = None
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Keep waiting this long for late peers after the --quorum is complete; same as --set "
            "grace_s=SECONDS. Default: 0; their current step is awaited in any case.",
            hidden=True,
        ),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="End training after this many evaluations without a better held-out loss; same as "
            "--set patience=N. Default: 0, never.",
        ),
    ] = None
    spot_checks: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Fraction of the steps that an idle worker repeats for comparison; 0: none; same as "
            "--set spot_checks=SHARE.",
            hidden=True,
        ),
    ] = None
    trace: Trace = False

    def read(self, path: Path, *more: str, shapes_only: bool = False) -> Job:
        """The job of a file with its overrides, ``more`` last; UsageError for local steps
        without a rule that has them, and for a compression that links cannot do. ``shapes_only``: as of
        ``load_job``."""
        from coordinator.client.job_file import load_job
        from coordinator.planning.codecs.ratios import check_compression

        given = (
            ("steps", self.steps),
            ("compress", self.compress),
            ("replicas", self.replicas),
            ("exchange", self.exchange),
            ("local_steps", self.local_steps),
            ("quorum", self.quorum),
            ("grace_s", self.grace),
            ("patience", self.patience),
            ("spot_checks", self.spot_checks),
        )
        items = [f"{name}={value}" for name, value in given if value is not None]
        overrides = [*(self.sets or []), *items, *more]
        job = load_job(path, overrides, full_trace=self.trace, shapes_only=shapes_only)
        check_compression(job.training.compression)  # before the capture, which takes its time
        if job.training.local_exchange is None and self.local_steps is not None:
            raise UsageError(
                f"--local-steps {self.local_steps} with --exchange {job.training.exchange}, which has none; "
                "give a rule, as --exchange diloco, or no --local-steps"
            )
        return job

    def load(self, path: Path, *more: str, shapes_only: bool = False) -> Job:
        """The job that ``read`` finds, with a block of micro-batches for each replica that it may have."""
        from coordinator.planning.peers.replicas import with_blocks

        job = self.read(path, *more, shapes_only=shapes_only)
        return replace(job, training=with_blocks(job.training))


@dataclass(frozen=True)
class PlanOptions(JobOptions):
    """The same for commands that make one plan, with what workers beside it are for."""

    standbys: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Idle workers that repeat a stage's steps, so that they can take it over at once. auto: "
            "if that is worth it; N: at most N. With 0 the plan is the fastest one, whatever a loss "
            "costs, and does not change when workers join.",
            hidden=True,
        ),
    ] = "auto"

    @property
    def most_standbys(self) -> int | None:
        """``--standbys`` as a job has it; UsageError for what it cannot be."""
        if self.standbys == "auto":
            return None
        if not self.standbys.isdecimal() or int(self.standbys) > MAX_STANDBYS:
            raise UsageError(f"--standbys {self.standbys}: give auto, or a number from 0 to {MAX_STANDBYS}")
        return int(self.standbys)


TOLD_EVERY_S = 10.0  # of long work, where nobody sees a line change


@contextmanager
def telling(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show on the error stream what is being done; nothing when ``quiet``."""
    if quiet:
        yield lambda what: None
    elif err.redraws:
        with err.status("") as status:
            yield lambda what: status.update(Text(what))
    else:
        yield lambda what: err.print(what)


def now_and_then(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``tell`` for what changes quickly: all of it on a terminal, elsewhere a line in so many
    seconds."""
    told_s = time.monotonic()

    def pass_on(what: str) -> None:
        nonlocal told_s
        if err.is_terminal or time.monotonic() - told_s >= TOLD_EVERY_S:
            told_s = time.monotonic()
            tell(what)

    return pass_on
