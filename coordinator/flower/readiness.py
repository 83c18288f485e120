"""Whether a run can begin with the workers there are, and if not, what to do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protos import atoll_apps_pb2 as pb

SHOWN = 8  # workers named in one message


@dataclass(frozen=True, slots=True)
class Verdict:
    """``nodes`` > 0: begin with so many. Else ``settled`` says whether only people can change it, and
    ``hopeless`` that waiting cannot: the app loads nowhere."""

    nodes: int
    settled: bool
    reason: str
    hopeless: bool = False


def judge(fleet: pb.AppFleet, wanted: int, app_hash: str, own: int = 0) -> Verdict:
    """What to do with this fleet; ``wanted`` 0: all that are ready once everybody has answered. ``own``:
    workers that the command started itself."""
    ready = fleet.nodes
    reason = explain(fleet, wanted, app_hash, own)
    if wanted and ready >= wanted:
        return Verdict(wanted, True, reason)
    if fleet.preparing:
        return Verdict(0, False, reason)
    if not wanted and ready:
        return Verdict(ready, True, reason)
    broken = sum(refused.kind == pb.APP_REFUSAL_NOT_LOADED for refused in fleet.refused)
    return Verdict(0, True, reason, hopeless=0 < fleet.attending == broken)


def explain(fleet: pb.AppFleet, wanted: int, app_hash: str, own: int = 0) -> str:
    """Who is ready, who is not and why, and the next move of each."""
    if not fleet.workers and own:
        return f"{own} workers of this machine are starting" if own > 1 else "a worker of this machine starts"
    if not fleet.workers:
        return "no worker is connected; start some with `atoll-worker join ... --allow-apps`"
    asked = f" of {wanted}" if wanted else ""
    words = [f"{fleet.nodes}{asked} nodes are ready"]
    if 0 < fleet.nodes < wanted and not fleet.preparing:
        share = -(-wanted // len(fleet.ready))
        words.append(f"a worker that is started with --app-nodes {share} is {share} nodes")
    if fleet.preparing:
        words.append(f"{fleet.preparing} fetch and load the app")
    unaccepted = [r for r in fleet.refused if r.kind == pb.APP_REFUSAL_NOT_ACCEPTED]
    if unaccepted:
        words.append(
            f"on {len(unaccepted)} of {fleet.attending} that run apps ({_names(unaccepted)}) the owner "
            f"has not accepted app {app_hash[:16]}: {unaccepted[0].reason}"
        )
    broken = [r for r in fleet.refused if r.kind == pb.APP_REFUSAL_NOT_LOADED]
    if broken:
        words.append(f"the ClientApp cannot be loaded on {_names(broken)}: {broken[0].reason.strip()}")
    words += [
        f"{refused.name}: {refused.reason}"
        for refused in fleet.refused
        if refused.kind == pb.APP_REFUSAL_OTHER
    ][:SHOWN]
    if fleet.busy:
        words.append(f"{fleet.busy} are busy with other work")
    without = fleet.workers - fleet.attending
    if without > 0:
        words.append(
            f"{without} of {fleet.workers} workers do not run apps: their owners may start them with "
            f"`atoll-worker join --allow-apps`"
        )
    return "; ".join(words)


def _names(refusals: list[pb.AppRefused]) -> str:
    names = [r.name for r in refusals]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
