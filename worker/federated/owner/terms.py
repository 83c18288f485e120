"""Terms of a federated job, read from its invitation: what would leave this machine, for policies and people.

The ops of a graph are not looked at here, only hashed: the compute process decodes and checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import ceil, prod
from typing import TYPE_CHECKING

from atoll.errors import BadFrame
from atoll.federated import FederatedSpec, parse_uplink
from atoll.job import TrainingSpec, stepwise_groups
from atoll.messages.to_worker import States
from atoll.sampling import held_out_of, local_steps
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos import bounds, coding
from protos.text_limits import clean
from strategies.clipping import unclippable
from strategies.counted import counted_names, few_numbers, returned_numbers, too_many, values_of
from strategies.files import update_metas
from strategies.layout import Layout, own_parts
from strategies.own.words import client_words
from strategies.privacy.private import strategy_of
from strategies.privacy.report import plan_words
from strategies.privacy.samples import charge_of, sample_words
from worker.data.policy import MAX_OWNER_CHARS, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.federated import Federated
    from strategies.base import Strategy
    from strategies.privacy.samples import Charge

SHOWN_NAMES, NAME_CHARS = 6, 60
MAX_FORMULAS = 1_600  # characters
TRAINING_NUMBERS = ("mean loss", "mean squared loss")  # of each round
Fact = tuple[str, str]


@dataclass(frozen=True)
class _Declared:
    """What an invitation declares beside its programs."""

    training: TrainingSpec
    federated: FederatedSpec
    states: States


class Asked:
    """A federated job's invitation. Raises BadFrame or UsageError for what breaks a bound."""

    def __init__(self, m: pb.Participate) -> None:
        self._m = m
        declared = coding.read(_Declared, m)
        self.training, self.federated, states = declared.training, declared.federated, declared.states
        self.strategy: Strategy = strategy_of(self.rule)
        used = {n for program in self._programs() for n in (*program.parameters, *program.buffers)}
        missing = sorted(used - states.keys())
        if missing:
            raise BadFrame(f"no shape for {missing[:3]}")
        groups = stepwise_groups(list(m.program.parameters), self.training.optimizer)
        frozen = {name for name, group in groups.items() if group.frozen}
        leaves = {name: states[name] for name in states if name in used}
        whole = Layout.of_state(leaves, frozen)
        self.layout: Layout = self.strategy.adapt(own_parts(whole, self.rule.local))
        buffers = {name for program in self._programs() for name in program.buffers}
        self._counted = counted_names(self.layout, buffers)
        self.numbers = returned_numbers(self.layout, buffers, self.strategy)
        self._sample_values = values_of({n: states[n].meta for n in m.program.inputs if n in states})

    @property
    def data(self) -> str:
        """Name of the data set."""
        return self.federated.data

    @property
    def rule(self) -> Federated:
        return self.federated.rule

    def terms(self, n_samples: int, place: str = "") -> Terms:
        """What a policy judges, where ``n_samples`` are registered; ``place``: as of ``Terms``."""
        few, excess = self._few(n_samples)
        m, graph = self._m, graph_hash(self._m)
        return Terms(
            bounds.name("job", m.job),
            self.federated.data,
            clean(m.owner, MAX_OWNER_CHARS),
            graph,
            coding.digest_of(graph.encode(), m.training, m.federated, m.batch.to_bytes(8, "little")),
            self.rule.min_clients,
            self.training.steps,
            unclippable(self.strategy, self.layout),
            min(self.numbers, 2**62),
            few,
            excess,
            place,
        )

    def facts(self, n_samples: int) -> tuple[Fact, ...]:
        """What would leave, in words: a heading and its text each; ``n_samples`` are registered here."""
        rule = self.rule
        clients = "all that hold the data" if not rule.clients else f"{rule.clients} clients"
        return (
            ("data set", f"{self.federated.data}, {n_samples:,} samples here"),
            ("submitted by", clean(self._m.owner, MAX_OWNER_CHARS) or "not stated"),
            ("graph", graph_hash(self._m)),
            ("each round", self._update_words()),
            ("buffers", self._buffer_words()),
            ("statistics", self._statistics_words(n_samples)),
            ("numbers", self._number_words()),
            ("evaluation", self._evaluation_words(n_samples)),
            ("in all", self._total_words(n_samples)),
            ("rounds", f"{self.training.steps}, each with {clients}"),
            ("strategy", f"{rule.strategy}: {self.strategy.facts.summary}"),
            *(() if rule.own is None else (("formulas", clean(client_words(rule.own), MAX_FORMULAS)),)),
            ("summed with", self._sum_words()),
            *self._privacy_facts(),
            *self._sample_facts(n_samples),
            *self._secure_facts(),
            *self._gateway_facts(),
            ("local steps", self._step_words(n_samples)),
            ("coding", self._coding_words()),
        )

    def _sum_words(self) -> str:
        if self.rule.privacy is not None and self.rule.secure is not None:
            return (
                "other members' updates, each with its part of the noise, before anybody can read any of them"
            )
        if self.rule.privacy is not None:
            return "those of others who are drawn, perhaps none, by the coordinator, which adds noise first"
        if self.rule.secure is not None:
            return "other members' updates, before the coordinator can read any of them"
        return f"at least {self.rule.min_clients - 1} other updates, by the coordinator"

    def _privacy_facts(self) -> tuple[Fact, ...]:
        if self.rule.privacy is None:
            return ()
        return (("privacy", plan_words(self.rule, self.training.steps)),)

    def charge(self, n_samples: int) -> Charge | None:
        """What an update tells of a single sample, where ``n_samples`` are registered; None: no bound is
        stated."""
        rule, batch = self.rule, max(1, self._m.batch)
        if rule.sample_privacy is None:
            return None
        trained = max(1, n_samples - held_out_of(n_samples, rule.held_out))
        steps = local_steps(trained, batch, rule.local_epochs, rule.local_steps)
        return charge_of(rule.sample_privacy, trained, batch, steps)

    def _sample_facts(self, n_samples: int) -> tuple[Fact, ...]:
        charge = self.charge(n_samples)
        if charge is None or self.rule.sample_privacy is None:
            return ()
        return (("each sample", sample_words(self.rule.sample_privacy, charge, self.training.steps)),)

    def _secure_facts(self) -> tuple[Fact, ...]:
        secure = self.rule.secure
        if secure is None:
            return ()
        words = (
            "each update is masked; the coordinator can open the sum of all members alone, at least "
            f"{secure.threshold:.0%} of a round and more than half. It holds against a coordinator that "
            "reads all and lies about who dropped out. It certifies the members, and could make some up"
        )
        return (("secure aggregation", words),)

    def _programs(self) -> tuple[job_pb.StageProgram, ...]:
        m = self._m
        return (m.program, m.eval_program) if m.HasField("eval_program") else (m.program,)

    def _gateway_facts(self) -> tuple[Fact, ...]:
        if not self.rule.gateways:
            return ()
        words = (
            "another worker of this one's site may be asked to add the update to its neighbours', and "
            "would see it. Only one that your policy names (`--gateway`) or a device of this machine may"
        )
        return (("gateways", words),)

    def _update_words(self) -> str:
        metas = update_metas(self.strategy, self.layout)
        numbers = sum(prod(meta.shape) for meta in metas.values())
        nbytes = sum(meta.nbytes for meta in metas.values())
        own = self.strategy.extra_up(self.layout)
        extra = f", with the strategy's own ({', '.join(sorted(own))})" if own else ""
        return (
            f"one update, how far training here moved the model: {len(metas)} tensors, {numbers:,} numbers, "
            f"{nbytes / 2**20:.2f} MiB before coding{extra}; gradients of few samples hold these samples"
        )

    def _buffer_words(self) -> str:
        if not self._counted:
            return "none travel"
        return f"{len(self._counted)} travel: {_listed(self._counted)}"

    def _statistics_words(self, n_samples: int) -> str:
        if not self.numbers:
            return "none beside the update"
        few, _ = self._few(n_samples)
        return (
            f"{self.numbers:,} numbers a round beside the update, exact sums or means over {self._m.batch} "
            f"samples of {self._sample_values:,} values; as many as samples have values give them back, and "
            f"{few:,} need no word of yours"
        )

    def _few(self, n_samples: int) -> tuple[int, str]:
        """Return how many numbers need no owner's word, and the refusal of more."""
        values, rounds = self._sample_values, self.training.steps
        samples = n_samples - held_out_of(n_samples, self.rule.held_out)
        few = few_numbers(values, samples, rounds)
        return few, too_many(self.numbers, few, values, samples, rounds) if self.numbers > few else ""

    def _total_words(self, n_samples: int) -> str:
        """Everything that depends on the data but the updates of trained tensors."""
        rule, m = self.rule, self._m
        own = 0 if rule.secure is not None else len(self.strategy.scalars_up())
        training = (len(TRAINING_NUMBERS) if rule.shows_losses else 0) + own + self.numbers
        evaluated = 1 + len(m.eval_program.metrics) if m.HasField("eval_program") else 0
        rounds = self.training.steps
        times = ceil(rounds / rule.evaluate_every) if rule.evaluate_every else 0
        return (
            f"about {training * rounds + evaluated * times:,} numbers beside {rounds:,} updates, of data of "
            f"{n_samples * self._sample_values:,} values"
        )

    def _number_words(self) -> str:
        if not self.rule.shows_losses:
            return "samples and steps trained, times; no loss"
        own = [scalar.name for scalar in self.strategy.scalars_up()]
        more = f"; the strategy's own: {', '.join(own)}" if own else ""
        return f"samples and steps trained, {', '.join(TRAINING_NUMBERS)}, times{more}"

    def _evaluation_words(self, n_samples: int) -> str:
        rule, m = self.rule, self._m
        if not rule.evaluate_every or not m.HasField("eval_program"):
            return "none here"
        metrics = ", ".join(["loss", *(_short(metric.name) for metric in m.eval_program.metrics)])
        held = int(n_samples * rule.held_out)
        when = "each round" if rule.evaluate_every == 1 else f"every {rule.evaluate_every} rounds"
        return f"{when} the means of {metrics} over the {held:,} samples that are held out of training"

    def _step_words(self, n_samples: int) -> str:
        rule, batch = self.rule, self._m.batch
        steps = rule.local_epochs * ceil(n_samples * (1.0 - rule.held_out) / max(1, batch))
        steps = min(steps, rule.local_steps) if rule.local_steps else steps
        return f"about {steps:,} a round, of {batch} samples each"

    def _coding_words(self) -> str:
        uplink = parse_uplink(self.rule.uplink)
        if uplink.mode == "off":
            masked = self.rule.secure is not None
            return "none: the update travels " + ("as masked whole numbers" if masked else "as it is")
        feedback = ", what is dropped is added to the next" if self.rule.error_feedback else ""
        return f"{self.rule.uplink}{feedback}; a codec saves bytes and hides nothing"


def _short(name: str) -> str:
    """A name that others chose: cut, so that it pushes no words out of sight, and fit for a terminal."""
    return clean(name, NAME_CHARS) + ("..." if len(name) > NAME_CHARS else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(map(_short, names[:SHOWN_NAMES]))}{more}"


def graph_hash(m: pb.Participate) -> str:
    """SHA-256 of what a job runs here: both graphs, the shapes of their tensors, the constants' contents, and
    the formulas of a strategy that is its owner's own.

    Equal for every client of a job, and for every job of the same captured model and micro-batch.
    """
    constants = {name for program in (m.program, m.eval_program) for name in program.constants}
    blobs = sorted((t.name, t.blob) for t in m.tensors if t.name in constants)
    metas = b"".join(sha256(coding.stable_bytes(meta)).digest() for meta in m.metas)
    own = (m.federated.own,) if m.federated.HasField("own") else ()
    return coding.digest_of(m.program, m.eval_program, metas, repr(blobs).encode(), *own)
