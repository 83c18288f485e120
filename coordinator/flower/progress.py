"""A run's events as lines for a person: rounds, metrics as the strategy logs them, bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.text_limits import clean

NODES_SHOWN = 12
METRICS_SHOWN = 6
ERRORS_SHOWN = 4


class Shown:
    """Turns events into lines; remembers the round and what it cost so far."""

    def __init__(self) -> None:
        self.rounds = 0
        self.down_bytes = self.up_bytes = 0
        self._head = ""
        self._kind = ""
        self._waiting = ""

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """The lines to show for an event, often none."""
        match event["event"]:
            case "waiting":
                # The same words once; they change with the fleet.
                said, self._waiting = self._waiting, str(event["reason"])
                return [] if said == self._waiting else [self._waiting]
            case "nodes":
                some = event["nodes"][:NODES_SHOWN]
                named = ", ".join(f"{n['name']} (partition {n['partition']})" for n in some)
                more = (
                    f" and {len(event['nodes']) - len(some)} more" if len(event["nodes"]) > len(some) else ""
                )
                return [f"{len(event['nodes'])} nodes: {named}{more}"]
            case "fleet":
                return [f"{event['nodes']} of {event['partitions']} nodes take part now"]
            case "reconnected":
                return ["the coordinator was lost and is found again"]
            case "round":
                self.rounds = int(event["round"])
                of = f"/{event['rounds']}" if event["rounds"] else ""
                self._head = f"round {event['round']}{of}"
                return []
            case "sent":
                self._kind = str(event["kind"])
                if not self.rounds:  # an app of its own loop: groups are all that it numbers
                    self._head = f"group {event['group']}" if event["group"] else ""
                return []
            case "replies":
                return self._replies(event)
            case "said":
                return [f"  {event['line']}"]
            case "metrics":
                return [f"{self._head or 'start'}  {self._of(event)}: {_metrics(event['metrics'])}"]
        return []

    def _of(self, event: Mapping[str, Any]) -> str:
        return f"{self._kind}, over clients" if event["of"] == "clients" else "global model"

    def _replies(self, event: Mapping[str, Any]) -> list[str]:
        self.down_bytes += event["down_bytes"]
        self.up_bytes += event["up_bytes"]
        failed = event["failed"] + event["late"]
        asked = event["replies"] + failed
        line = (
            f"{self._head or 'message'}  {self._kind}: {event['replies']} of {asked} nodes in "
            f"{event['took_s']:.2f} s, down {in_bytes(event['down_bytes'])}, up {in_bytes(event['up_bytes'])}"
        )
        lines = [line]
        lines += [f"  error from {error}" for error in event["errors"][:ERRORS_SHOWN]]
        if event["failed"] > ERRORS_SHOWN:
            lines.append(f"  and {event['failed'] - ERRORS_SHOWN} more errors")
        if event["late"]:
            lines.append(f"  {event['late']} nodes did not answer in time and were told to stop")
        return lines

    def summary(self) -> str:
        """The last line of a run."""
        return f"done; in all down {in_bytes(self.down_bytes)}, up {in_bytes(self.up_bytes)}"


def _metrics(metrics: Mapping[str, Any]) -> str:
    shown = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in metrics.items()
    ]
    more = f", and {len(shown) - METRICS_SHOWN} more" if len(shown) > METRICS_SHOWN else ""
    return ", ".join(clean(text, 80) for text in shown[:METRICS_SHOWN]) + more


def in_bytes(count: int) -> str:
    """1234567 -> '1.23 MB'."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
