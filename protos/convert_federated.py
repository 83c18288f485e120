"""Federated jobs and registered data between pb2 and atoll's types; what arrives is bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from atoll.errors import BadFrame
from atoll.federated import (
    COUNTED_SAMPLES,
    MAX_DIMS,
    MAX_FIELDS,
    MAX_OPTIONS,
    MAX_SAMPLES,
    DatasetFacts,
    Federated,
    FederatedSpec,
    FieldFacts,
    Option,
)
from protos import atoll_control_pb2 as control
from protos import atoll_job_pb2 as pb
from protos import bounds
from protos.bounds import Limits

MAX_DATASETS = 256  # a worker
MAX_FIGURES = 64  # scalars, and metrics, of one message


def options_to_proto(options: Mapping[str, Option]) -> list[pb.Option]:
    """Options sorted by name."""
    return [_option(name, options[name]) for name in sorted(options)]


def options_from_proto(what: str, messages: Iterable[pb.Option], limits: Limits) -> dict[str, Option]:
    """Options by name; BadFrame for one without a value or given twice."""
    found: dict[str, Option] = {}
    for m in bounds.count(what, list(messages), MAX_OPTIONS):
        name = bounds.name(f"name in {what}", m.name, limits)
        kind = m.WhichOneof("value")
        if kind is None or name in found:
            raise BadFrame(f"{what}: {name[:64]!r} {'has no value' if kind is None else 'is given twice'}")
        value: Option = getattr(m, kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadFrame(f"{what}: {name[:64]!r} = {value}; a finite number is accepted")
        found[name] = value
    return found


def federated_to_proto(spec: FederatedSpec) -> pb.FederatedSpec:
    """Convert what clients and server must agree on."""
    rule = spec.rule
    return pb.FederatedSpec(
        strategy=rule.strategy,
        options=options_to_proto(rule.options),
        local_epochs=rule.local_epochs,
        local_steps=rule.local_steps,
        clients=rule.clients,
        min_clients=rule.min_clients,
        deadline_s=rule.deadline_s,
        evaluate_every=rule.evaluate_every,
        held_out=rule.held_out,
        selector=rule.selector,
        selector_options=options_to_proto(rule.selector_options),
        uplink=rule.uplink,
        error_feedback=rule.error_feedback,
        downlink=rule.downlink,
        max_samples=rule.max_samples,
        local=rule.local,
        data=spec.data,
        inputs=[pb.FieldOfInput(input=name, field=spec.inputs[name]) for name in sorted(spec.inputs)],
    )


def federated_from_proto(message: pb.FederatedSpec, limits: Limits) -> FederatedSpec:
    """Read what clients and server must agree on; the types' own checks raise UsageError."""
    inputs: dict[str, str] = {}
    for m in bounds.count("inputs", message.inputs, MAX_FIELDS):
        if m.input in inputs:
            raise BadFrame(f"input {m.input[:64]!r} is given twice")
        inputs[bounds.name("input", m.input, limits)] = bounds.name("field", m.field, limits)
    rule = Federated(
        strategy=message.strategy,
        options=options_from_proto("options", message.options, limits),
        local_epochs=message.local_epochs,
        local_steps=message.local_steps,
        clients=message.clients,
        min_clients=message.min_clients,
        deadline_s=message.deadline_s,
        evaluate_every=message.evaluate_every,
        held_out=message.held_out,
        selector=message.selector,
        selector_options=options_from_proto("selector_options", message.selector_options, limits),
        uplink=message.uplink,
        error_feedback=message.error_feedback,
        downlink=message.downlink,
        max_samples=message.max_samples or COUNTED_SAMPLES,  # a job journalled before there was a bound
        local=tuple(bounds.count("local", message.local, MAX_OPTIONS)),
    )
    return FederatedSpec(rule, message.data, inputs)


def dataset_to_proto(facts: DatasetFacts) -> control.DatasetFacts:
    """Convert the facts of a data set that leave its owner's machine."""
    return control.DatasetFacts(
        name=facts.name,
        n_samples=facts.n_samples,
        fields=[control.FieldFacts(name=f.name, dtype=f.dtype, shape=f.shape) for f in facts.fields],
    )


def dataset_from_proto(message: control.DatasetFacts) -> DatasetFacts:
    """Read a worker's facts of a data set; BadFrame or UsageError when a bound is broken."""
    fields = tuple(
        FieldFacts(f.name, f.dtype, tuple(bounds.count("shape of a field", f.shape, MAX_DIMS)))
        for f in bounds.count("fields of a data set", message.fields, MAX_FIELDS)
    )
    samples = bounds.within("samples of a data set", message.n_samples, 1, MAX_SAMPLES)
    return DatasetFacts(message.name, samples, fields)


def datasets_from_proto(messages: Iterable[control.DatasetFacts]) -> tuple[DatasetFacts, ...]:
    """A worker's data sets; BadFrame when there are too many or a name repeats."""
    found = tuple(dataset_from_proto(m) for m in bounds.count("data sets", list(messages), MAX_DATASETS))
    if len({facts.name for facts in found}) < len(found):
        raise BadFrame("a data set's name repeats")
    return found


def figures(what: str, values: Mapping[str, float], limits: Limits) -> dict[str, float]:
    """Named numbers of a peer, sorted by name; whether they are finite, their reader judges."""
    bounds.count(what, values, MAX_FIGURES)
    return {bounds.name(f"name in {what}", name, limits): values[name] for name in sorted(values)}


def _option(name: str, value: Option) -> pb.Option:
    if isinstance(value, bool):
        return pb.Option(name=name, boolean=value)
    if isinstance(value, int):
        return pb.Option(name=name, integer=value)
    if isinstance(value, float):
        return pb.Option(name=name, real=value)
    return pb.Option(name=name, text=value)
