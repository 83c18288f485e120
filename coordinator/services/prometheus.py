"""Prometheus metrics of one coordinator, served on a port of their own when asked for."""

from __future__ import annotations

from collections import Counter as Count
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from atoll.errors import UsageError
from atoll.worker_names import distinct
from coordinator.federated.driver import FederatedDriver
from coordinator.membership import member
from coordinator.messages import jobs as job_state
from coordinator.messages.credits import totals
from coordinator.messages.jobs import RUNNING
from coordinator.relay.book import CAUSES, Book, RelayLimits
from coordinator.services.owners.in_names import names_of
from coordinator.services.owners.views import carried
from protos import telemetry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from coordinator.federated.state import FederationState
    from coordinator.shell import Shell


class Collector(Protocol):
    """Yields metrics whenever it is asked."""

    def collect(self) -> Iterable[Metric]:
        """Every metric as it is now."""


class Page:
    """Metrics on a port of their own. UsageError when it cannot be had."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give another --metrics port"
            ) from None
        self.host, self.port = str(self._server.server_address[0]), int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2)


class Exporter:
    """Reads the scheduler's state when scraped; a scrape never waits for training."""

    def __init__(self, shell: Shell, host: str, port: int, relay: Book[Any] | None = None) -> None:
        """``relay``: the books of the coordinator's own one, None where it runs none."""
        self._shell, self._relay = shell, relay or Book(RelayLimits())
        self._page = Page(self, host, port)
        self.host, self.port = self._page.host, self._page.port

    def collect(self) -> Iterable[Metric]:
        """Every metric of ``protos.telemetry`` that the coordinator knows."""
        scheduler = self._shell.scheduler
        jobs = list(scheduler.jobs.values())
        roster = list(scheduler.roster.workers.values())
        # Every state has its series from the start, nothing in it is a zero: a rate or an alert needs both.
        workers = Count(w.member.phase for w in roster)
        yield _family(telemetry.WORKERS, {phase.value: workers[phase] for phase in member.Phase})
        phases = Count(job.phase for job in jobs)
        yield _family(telemetry.JOBS, {phase.value: phases[phase] for phase in job_state.Phase})
        yield _family(telemetry.STEPS, {job.job: job.step for job in jobs})
        ledger = scheduler.ledger
        held = {name: job.last_checkpoint.step for name, job in list(ledger.jobs.items())}
        worked = totals(ledger.credits, held)
        yield _family(telemetry.CREDIT_STEPS, {kind: work.steps for kind, work in worked.items()})
        yield _family(telemetry.CREDIT_SECONDS, {kind: w.computed_ms / 1e3 for kind, w in worked.items()})
        measured = {kind: work.energy_mj / 1e3 for kind, work in worked.items() if work.energy_mj}
        yield _family(telemetry.CREDIT_ENERGY, measured)
        yield _family(telemetry.LOSS, {j.job: j.loss for j in jobs if j.loss is not None})
        yield _family(telemetry.STEP_SECONDS, {j.job: j.median_step_s for j in jobs if j.median_step_s})
        commits = {job.job: self._shell.commit_median_s(job.job) for job in jobs}
        yield _family(telemetry.COMMIT_SECONDS, {job: s for job, s in commits.items() if s is not None})
        drivers = ((job.job, scheduler.driver_of(job.job)) for job in jobs)
        states = (driver.jobs.get(name) for name, driver in drivers if isinstance(driver, FederatedDriver))
        yield from federated_metrics(state for state in states if state is not None)
        names = distinct(names_of(scheduler.roster))
        links = list(scheduler.roster.links.table.estimates.items())
        rates = {(names.get(a, a), names.get(b, b)): link.bandwidth_bps for (a, b), link in links}
        yield _family(telemetry.LINK_RATE, rates)
        yield self._ratios()
        yield from relay_metrics(self._relay)
        health = self._shell.health.now()
        yield _family(telemetry.LAG_SECONDS, {(): health.lag_s})
        yield _family(telemetry.APPEND_SECONDS, {(): health.append_s})
        yield _family(telemetry.DISK_FREE, {(): health.disk_free_bytes})
        yield _family(telemetry.DROPPED, dict(scheduler.effects.dropped))

    def _ratios(self) -> Metric:
        found: dict[tuple[str, ...], float] = {}
        scheduler = self._shell.scheduler
        names = distinct(names_of(scheduler.roster))
        for job in list(scheduler.jobs.values()):
            if job.phase in RUNNING:
                for link in carried(scheduler, job):
                    if link.dense_bytes_per_step:
                        ratio = link.dense_bytes_per_step / link.bytes_per_step
                        ends = [names.get(worker, worker) for worker in (link.source, link.target)]
                        found[(*ends, link.codec)] = ratio
        return _family(telemetry.LINK_RATIO, found)

    def close(self) -> None:
        """Stop serving."""
        self._page.close()


class RelayExporter:
    """The metrics of a relay that runs by itself."""

    def __init__(self, relay: Book[Any]) -> None:
        self._relay = relay

    def collect(self) -> Iterable[Metric]:
        """Every metric of a relay."""
        return relay_metrics(self._relay)


def relay_metrics(relay: Book[Any]) -> Iterable[Metric]:
    """What a relay has passed and refused, and who is there."""
    yield _family(telemetry.RELAY_BYTES, {(): relay.joined_bytes})
    waiting = relay.waiting
    yield _family(telemetry.RELAY_CONNECTIONS, {"waiting": waiting, "joined": relay.connections - waiting})
    yield _family(telemetry.RELAY_REFUSED, {cause: relay.refused[cause] for cause in CAUSES})


def federated_metrics(states: Iterable[FederationState]) -> Iterable[Metric]:
    """The metrics of these jobs.

    Of a private job rounds and epsilon alone: the others would tell who took part in a round.
    """
    rounds, seconds, epsilon = dict[str, float](), dict[str, float](), dict[str, float]()
    clients: dict[tuple[str, ...], float] = {}
    for state in states:
        rounds[state.job] = state.round
        privacy, last = state.federated.rule.privacy, state.last
        if privacy is not None:
            epsilon[state.job] = state.spent.epsilon(privacy.delta)[0]
        elif last is not None:
            answered = sum(len(entry.get("clients", (name,))) for name, entry in last.participants.items())
            refused = len(last.dropped)
            found = {"asked": answered + refused, "answered": answered, "refused": refused}
            clients |= {(state.job, outcome): number for outcome, number in found.items()}
            seconds[state.job] = last.took_s
    yield _family(telemetry.ROUNDS, rounds)
    yield _family(telemetry.ROUND_CLIENTS, clients)
    yield _family(telemetry.ROUND_SECONDS, seconds)
    yield _family(telemetry.EPSILON, epsilon)


def _family(
    metric: telemetry.Metric, values: Mapping[Any, float | None]
) -> GaugeMetricFamily | CounterMetricFamily:
    """Return a metric with its values by label, or by a tuple of labels where it has several or none; None
    counts 0. One whose name ends in total is a counter."""
    kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=list(metric.labels))
    for labels, value in values.items():
        family.add_metric([labels] if isinstance(labels, str) else list(labels), float(value or 0.0))
    return family
