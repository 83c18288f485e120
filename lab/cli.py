"""``python -m lab``: run things in a scenario, look at scenarios, measure them, clean up.

Exit codes: that of the command for ``run`` and ``exec``; 0 fine; 1 the lab failed; 2 wrong use;
130 interrupted. ``check`` exits 1 when a pair is more than the tolerance off its file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from atoll.errors import AtollError, UsageError
from lab.check import CheckReport, PairFigures, check, worst
from lab.fleet import fleet_of
from lab.loopback import LoopbackLab
from lab.reader import dump_scenario, read_scenario
from lab.scenario import Scenario, shipped_names
from lab.state import all_states
from lab.state import clean as clean_stale
from lab.tun import unavailable
from lab.world import Lab, join

app = typer.Typer(
    name="lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An internet on one machine: hosts, links with rate, delay and loss, shared uplinks, CPU speeds.",
)

Name = Annotated[str, typer.Argument(metavar="SCENARIO", help="a shipped scenario's name or a .toml file")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
Words = Annotated[list[str], typer.Argument(metavar="CMD...", help="the command and its arguments, after --")]
_EXAMPLE = "\n\nExample: python -m lab "


def say(text: str) -> None:
    """A line for people; standard output belongs to the command and to --json."""
    print(text, file=sys.stderr, flush=True)


def build(scenario: Scenario, loopback: bool, quotas: bool) -> Lab | LoopbackLab:
    """The real lab, or the approximate one where asked for or where namespaces are not possible."""
    reason = unavailable()
    if not loopback and reason is None:
        return Lab(scenario, quotas=quotas)
    if not loopback:
        say(f"lab: {reason}: approximate lab on loopback, shaped by the workers themselves")
    return LoopbackLab(scenario)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave through the same door as Ctrl+C."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command(
    epilog=_EXAMPLE + "run two_islands -- python benchmarks/transport.py"
    "\n\nThe command finds LAB_ID, LAB_HOST and LAB_HOSTS (JSON: host -> address) in its environment; "
    "from inside, python -m lab exec HOST -- CMD starts things in other hosts."
)
def run(
    scenario: Name,
    command: Words,
    host: Annotated[str, typer.Option(help="where to run it; default: the coordinator's host")] = "",
    outside: Annotated[bool, typer.Option(help="run it outside all hosts, with LAB_ID set")] = False,
    loopback: Annotated[bool, typer.Option(help="approximate lab on loopback, no root needed")] = False,
    quotas: Annotated[bool, typer.Option(help="--no-quotas leaves CPU speeds alone")] = True,
) -> None:
    """Run a command in a scenario; the lab goes when the command ends."""
    world = read_scenario(scenario)
    place = world.host(host or world.coordinator).name
    with ended_by_signals(), build(world, loopback, quotas) as lab:
        say(f"lab {lab.name}: {world.name}, {len(world.hosts)} hosts; {'outside' if outside else place}")
        process = lab.popen_outside(command) if outside else lab.popen(place, command, stdin=None)
        code = wait(process)
    raise SystemExit(code)


def wait(process: subprocess.Popen[Any]) -> int:
    """The exit code; Ctrl+C goes to the process first, which has a session of its own."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(1.5)
        except subprocess.TimeoutExpired:
            process.kill()
        return 130


@app.command(name="exec", epilog=_EXAMPLE + "exec fast1 -- ip address")
def exec_(
    host: Annotated[str, typer.Argument(help="a host of the lab")],
    command: Words,
    lab: Annotated[str, typer.Option(help="which lab (lab list); default: the one this runs in")] = "",
) -> None:
    """Run a command in a host of a lab that is up."""
    raise SystemExit(wait(join(lab).popen(host, command, stdin=None)))


@app.command(name="set", epilog=_EXAMPLE + "set fast1 slow1 --ms 80 --loss 0.01")
def set_(
    a: Annotated[str, typer.Argument(help="a host")],
    b: Annotated[str, typer.Argument(help="another host")],
    lab: Annotated[str, typer.Option(help="which lab; default: the one this runs in")] = "",
    mbit: Annotated[float | None, typer.Option(help="rate of each direction, Mbit/s")] = None,
    ms: Annotated[float | None, typer.Option(help="one-way delay")] = None,
    loss: Annotated[float | None, typer.Option(help="share of packets lost, 0 to 0.99")] = None,
    cut: Annotated[
        bool | None, typer.Option("--cut/--heal", help="lose everything, or stop losing it")
    ] = None,
    one_way: Annotated[bool, typer.Option("--one-way", help="only from A to B")] = False,
) -> None:
    """Change a link of a lab that is up."""
    hosts = join(lab)
    if (mbit, ms, loss) != (None, None, None):
        hosts.set_link(a, b, mbit=mbit, ms=ms, loss=loss, both=not one_way)
    elif cut is None:
        raise UsageError("nothing to change; give --mbit, --ms, --loss, --cut or --heal")
    if cut is not None:
        (hosts.cut if cut else hosts.heal)(a, b, both=not one_way)


@app.command(epilog=_EXAMPLE + "move home1")
def move(
    host: Annotated[str, typer.Argument(help="a host of the lab")],
    address: Annotated[str, typer.Argument(help="10.80.X.Y; default: one that it did not have")] = "",
    lab: Annotated[str, typer.Option(help="which lab; default: the one this runs in")] = "",
) -> None:
    """Give a host of a lab that is up another address, and print it."""
    print(join(lab).move(host, address or None))


@app.command(epilog=_EXAMPLE + "stats --lab 4711-1")
def stats(
    lab: Annotated[str, typer.Option(help="which lab; default: the one this runs in")] = "",
    as_json: AsJson = False,
) -> None:
    """What every link of a lab that is up has carried."""
    found = join(lab).stats()
    flows = [
        {"from": source, "to": target, **asdict(totals)}
        for (source, target), totals in found.flows.items()
        if totals.packets or totals.drops
    ]
    if as_json:
        print(json.dumps({"at_s": found.at_s, "router_cpu_s": found.router_cpu_s, "flows": flows}))
        return
    table = Table("from", "to", "MB", "packets", "drops", title=f"router CPU {found.router_cpu_s:.2f} s")
    for flow in flows:
        table.add_row(
            *(str(flow[key]) for key in ("from", "to")),
            f"{flow['bytes'] / 1e6:.3f}",
            *(str(flow[key]) for key in ("packets", "drops")),
        )
    Console().print(table)


@app.command(epilog=_EXAMPLE + "show homes")
def show(
    scenario: Name,
    as_json: AsJson = False,
    fleet: Annotated[bool, typer.Option("--fleet", help="print it as a fleet file for atoll plan")] = False,
) -> None:
    """Print a scenario: its hosts, its uplinks, its links."""
    world = read_scenario(scenario)
    if fleet:
        print(fleet_of(world), end="")
    elif as_json:
        print(json.dumps(dump_scenario(world)))
    else:
        _show(world)


def _show(world: Scenario) -> None:
    console = Console()
    console.print(
        f"[bold]{world.name}[/bold]  {world.title}\n\n{world.notes}\n", highlight=False, soft_wrap=True
    )
    console.print(
        f"coordinator in {world.coordinator}; join order {', '.join(world.join_order)}; {world.congestion}, "
        f"MTU {world.mtu}; CPU quotas {world.cpu_total:g} cores in all"
    )
    hosts = Table("host", "group", "CPU", "memory MiB", "up", "down", "inbound", "worker")
    for host in world.hosts:
        figures = [host.cpu, host.memory_mib, host.uplink.up_mbit, host.uplink.down_mbit]
        hosts.add_row(
            host.name,
            host.group or "",
            *("" if v is None else f"{v:g}" for v in figures),
            "yes" if host.inbound else "no",
            "yes" if host.worker else "no",
        )
    console.print(hosts)
    for group in world.groups:
        console.print(
            f"group {group.name}: shared uplink {group.uplink.up_mbit} up, {group.uplink.down_mbit} down"
            + ("" if group.uplink.both_mbit is None else f", {group.uplink.both_mbit:g} both together")
        )
    links = Table("from \\ to", *world.host_names, title="Mbit/s of one flow · ms one way")
    for source in world.host_names:
        links.add_row(source, *(_cell(world, source, target) for target in world.host_names))
    console.print(links)


def _cell(world: Scenario, source: str, target: str) -> str:
    if source == target:
        return ""
    link = world.link(source, target)
    lost = f" {link.loss:.2%}" if link.loss else ""
    return f"{world.bottleneck_mbit(source, target):g} · {link.ms:g}{lost}"


@app.command(name="check", epilog=_EXAMPLE + "check two_islands --seconds 3")
def check_(
    scenario: Name,
    seconds: Annotated[float, typer.Option(min=0.2, max=60, help="how long each rate is measured")] = 2.0,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="how far below the file a rate may be")
    ] = 0.07,
    as_json: AsJson = False,
) -> None:
    """Measure every pair's rate and round trip against the file (root only)."""
    world = read_scenario(scenario)
    # The meters' own CPU time must not be the limit: quotas off.
    with ended_by_signals(), Lab(world, quotas=False) as lab:
        report = check(lab, seconds, told=lambda pair: None if as_json else say(_words(pair)))
    if as_json:
        pairs = [asdict(pair) | {"rate_share": pair.rate_share} for pair in report.pairs]
        print(json.dumps(asdict(report) | {"scenario": world.name, "pairs": pairs}))
    else:
        _print_report(world, report)
    low = worst(report.pairs)
    if low is not None and low.rate_share < 1 - tolerance:
        say(f"lab: {_words(low)}: more than {tolerance:.0%} below the file; is the machine busy?")
        raise SystemExit(1)


def _words(pair: PairFigures) -> str:
    if not pair.reachable:
        return f"{pair.source} > {pair.target}: accepts no inbound connection"
    return (
        f"{pair.source} > {pair.target}: {pair.mbit:.2f} of {pair.asked_mbit:g} Mbit/s, {pair.rtt_ms:.2f} of "
        + (f"{pair.asked_rtt_ms:g} ms")
    )


def _print_report(world: Scenario, report: CheckReport) -> None:
    table = Table(
        "from", "to", "Mbit/s", "of", "share", "RTT ms", "of", "over", title=f"{world.name}, measured"
    )
    for pair in report.pairs:
        if pair.reachable:
            table.add_row(
                pair.source,
                pair.target,
                f"{pair.mbit:.2f}",
                f"{pair.asked_mbit:g}",
                f"{pair.rate_share:.1%}",
                f"{pair.rtt_ms:.2f}",
                f"{pair.asked_rtt_ms:g}",
                f"{pair.rtt_ms - pair.asked_rtt_ms:.2f}",
            )
        else:
            table.add_row(pair.source, pair.target, "no inbound", f"{pair.asked_mbit:g}", "", "", "", "")
    console = Console()
    console.print(table)
    console.print(
        f"router: {report.router_cpu_share:.1%} of a core, "
        f"{report.router_cpu_s_per_gbit:.2f} CPU s per Gbit, {report.priority}"
    )


@app.command(name="list", epilog=_EXAMPLE + "list --json")
def list_(as_json: AsJson = False) -> None:
    """The shipped scenarios, and the labs that are up."""
    scenarios = {name: read_scenario(name).title for name in shipped_names()}
    labs = [
        {
            "lab": state.lab,
            "scenario": state.scenario["name"],
            "pid": state.owner_pid,
            "alive": state.alive,
            "hosts": dict(state.addresses),
        }
        for state in all_states()
    ]
    if as_json:
        print(json.dumps({"scenarios": scenarios, "labs": labs}))
        return
    for name, title in scenarios.items():
        print(f"{name:14} {title}")
    for lab in labs:
        stale = "" if lab["alive"] else "  (its owner is gone: lab clean)"
        print(f"\nlab {lab['lab']}: {lab['scenario']}, owner {lab['pid']}{stale}")


@app.command(epilog=_EXAMPLE + "clean")
def clean(as_json: AsJson = False) -> None:
    """Remove what killed labs have left: processes, namespaces, CPU groups, files."""
    removed = clean_stale()
    print(json.dumps({"removed": removed}) if as_json else f"{len(removed)} stale labs removed")


def main() -> NoReturn:
    """Run the command line; errors are one line, without a traceback."""
    try:
        app()
    except AtollError as error:
        say(f"lab: {error}")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)
