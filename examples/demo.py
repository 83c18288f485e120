"""`make demo`: a GPT trained by four workers across an emulated WAN, shown and checked.

As root: the ``two_islands`` lab, where a real network of namespaces joins two fast and two slow
hosts over one 8 Mbit/s, 40 ms line, and no machine has the memory for the whole model. Otherwise the
same scenario on loopback, shaped by the workers themselves (approximate). Every process is started
with the command a user would type. Two minutes on two quiet cores; exit code 0 when every check
holds, however long it took.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from atoll.errors import AtollError
from coordinator.cli.processes import ended_by_signals
from experiments.demo.run import play
from experiments.demo.scene import Lender, Scene, next_steps, summary
from experiments.demo.shown import Shown
from lab.loopback import LoopbackLab
from lab.scenario import Host
from lab.tun import LabError, unavailable
from lab.world import Hosts, Lab

ROOT = Path(__file__).resolve().parent.parent
JOB = "examples/gpt.py"
SCENARIO = "two_islands"
PORT = 7700
TRAIN_FOR = "45s"  # as predicted; the rest of two minutes is starting, probing, storing and evaluating
LEAST_STEPS = 30  # fewer leave the loss above what is promised
LOSS_SHARE = 0.88  # of the unigram entropy: what the trained model must reach


def scene_of(lab: Hosts, steps: int | None) -> Scene:
    """The GPT on every host of the lab that lends itself; ``steps`` None: as many as fit."""
    scenario = lab.scenario
    kind = "loopback, shaped by the workers (approximate)" if lab.approximate else "network namespaces"
    workers = (Lender(name, lending(lab, scenario.host(name))) for name in scenario.join_order)

    def start(host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        if lab.approximate:  # its workers emulate the links themselves
            arguments = ["lab.shaped_worker" if word == "worker.cli" else word for word in arguments]
        return lab.python(host, *arguments, cwd=ROOT, text=True, **streams)

    return Scene(
        title=f"{scenario.title}; {kind}",
        job=JOB,
        workers=tuple(workers),
        stages=3,
        loss_share=LOSS_SHARE,
        training=("--steps", str(steps)) if steps else ("--steps", str(LEAST_STEPS), "--for", TRAIN_FOR),
        why="no machine and no island has the memory for the whole model",
        host=scenario.coordinator,
        listen=f"{lab.address(scenario.coordinator)}:{PORT}",
        start=start,
    )


def lending(lab: Hosts, host: Host) -> tuple[str, ...]:
    """What a host's `atoll-worker join` says of it."""
    options = ["--threads", "1", "--device", "cpu"]
    options += ["--listen", f"{lab.address(host.name)}:0"] if lab.approximate else []
    options += ["--site", host.group] if host.group else []
    return (*options, *(["--stage-memory", f"{host.memory_mib:g}MiB"] if host.memory_mib else []))


def open_lab(loopback: bool, shown: Shown) -> Lab | LoopbackLab:
    """The namespace lab where it can be built, loopback otherwise, saying which and why."""
    reason = "asked for" if loopback else unavailable()
    if reason is None:
        try:
            return Lab(SCENARIO).start()
        except LabError as error:
            reason = str(error)
    shown.say(f"no namespace lab ({reason}): running on loopback, its WAN is approximate")
    return LoopbackLab(SCENARIO).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every check holds, 1 when one does not, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, help=f"training steps; default: as many as fit into {TRAIN_FOR}, by the plan"
    )
    parser.add_argument("--loopback", action="store_true", help="do not build namespaces even as root")
    parser.add_argument("--keep", type=Path, help="keep logs, weights and state in this folder")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ended_by_signals())
            temporary = tempfile.TemporaryDirectory(prefix="atoll-demo-")
            folder = options.keep or Path(stack.enter_context(temporary))
            folder.mkdir(parents=True, exist_ok=True)
            shown = stack.enter_context(Shown(console))
            lab = open_lab(options.loopback, shown)
            stack.callback(lab.close)
            scene = scene_of(lab, options.steps)
            outcome = play(scene, folder.resolve(), shown)
    except AtollError as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    text = f"shown:\n{summary(outcome, scene, shown.took_s)}\n{next_steps(JOB)}"
    console.print(text, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
