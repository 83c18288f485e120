"""What a federated graph may return: hostile ones are refused by name, at both ends, and honest ones pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UnsupportedOp, UsageError
from atoll.federated import NO_FLOORS, Federated, Floors, Registered
from atoll.job import Job, TrainingSpec
from atoll.opdag import Kind, LeafRef, OpNode, OpRef, Source
from atoll.program import StageProgram
from coordinator.capture.capture import Captured, capture
from coordinator.client.prepare import check_graphs, prepare
from strategies import make_strategy
from strategies.fedimpro_module import FedImpro
from strategies.returned import check_returned
from strategies.supcon_module import supcon
from tests.inprocess.federation import LocalFederation, local_model
from tests.strategies.test_modules import C, Net, batch, fedimpro
from tests.worker.federated.test_participation import Server, joined
from tests.worker.federated.test_trainer import SGD, Small, arrays

B, D = 8, 6
ROWS = {"x": torch.randn(B, D), "y": torch.arange(B) % 3}
Forward = Callable[["Rows", Tensor, Tensor], "Tensor | dict[str, Tensor]"]


class Rows(nn.Module):
    """A linear classifier of rows [B, D] with a few buffers, and ``also``, which does what it likes."""

    mean: Tensor
    var: Tensor
    one: Tensor

    def __init__(self, also: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, 3)
        self.weights = nn.Parameter(torch.randn(B, D))
        self.register_buffer("seen", torch.zeros(B, D))
        self.register_buffer("store", torch.zeros(3, D))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("var", torch.ones(D))
        self.register_buffer("wide", torch.zeros(B * D))
        self.register_buffer("wide_var", torch.ones(B * D))
        self.register_buffer("by_row", torch.zeros(B))
        self.register_buffer("by_row_var", torch.ones(B))
        self.register_buffer("one", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first", torch.eye(B)[:1].T.clone())  # [B, 1]: 1 for the first sample
        self.also = also

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        return self.also(self, x, y)

    def normalise(self, x: Tensor, mean: Tensor, var: Tensor, momentum: float = 0.1) -> Tensor:
        return F.batch_norm(x, mean, var, training=True, momentum=momentum)


def writes(write: Callable[[Any, Tensor, Tensor], object]) -> Forward:
    """In training ``write`` does something beside the loss."""

    def forward(self: Rows, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                write(self, x, y)
        return self.plain(x, y)

    return forward


def told(metric: Callable[[Any, Tensor, Tensor], Tensor]) -> Forward:
    """In evaluation ``metric`` is told beside the loss."""

    def forward(self: Rows, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        loss = self.plain(x, y)
        return loss if self.training else {"loss": loss, "told": metric(self, x, y)}

    return forward


def _counted(self: Any, x: Tensor, y: Tensor) -> None:
    self.steps.add_(1)
    self.seen.copy_(torch.where(self.steps == 2, x, self.seen))


def _through_steps(self: Any, x: Tensor, y: Tensor) -> None:
    """A counter that never travels carries a value to a buffer that does."""
    self.one.copy_(self.steps.to(torch.float32) / 1e6)
    self.steps.copy_((x[0, 0] * 1e6).to(torch.int64))


def _later(self: Any, x: Tensor, y: Tensor) -> None:
    """What one step leaves in an integer buffer another reads."""
    self.mean.add_(self.steps.to(torch.float32))
    self.steps.add_(y[0])


def _in_evaluation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    if not self.training:
        self.seen.copy_(x)
    loss: Tensor = self.plain(x, y)
    return loss


def _kept_for_evaluation(self: Any, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
    loss: Tensor = self.plain(x, y)
    if self.training:
        return loss
    self.wide.copy_(x.flatten())
    return {"loss": loss, "told": self.wide[3]}


HOSTILE: dict[str, tuple[Forward, str]] = {
    # Buffers that take the rows as they are, by every kind of write.
    "copy_": (writes(lambda s, x, y: s.seen.copy_(x)), "buffer 'seen'.*aten.copy_"),
    "a view of the buffer": (writes(lambda s, x, y: s.seen.view(-1).copy_(x.flatten())), "buffer 'seen'"),
    "a row of the buffer": (writes(lambda s, x, y: s.seen[2].copy_(x[2])), "buffer 'seen'"),
    "a chunk of the buffer": (writes(lambda s, x, y: s.seen.chunk(2)[1].copy_(x[:4])), "buffer 'seen'"),
    "an op that returns its argument": (
        writes(lambda s, x, y: s.seen.type_as(s.head.weight).copy_(x)), "buffer 'seen'"
    ),
    "index_put_": (
        writes(lambda s, x, y: s.seen.index_put_((torch.arange(B),), x)), "buffer 'seen'.*index_put_"
    ),
    "scatter_": (
        writes(lambda s, x, y: s.seen.scatter_(0, y[:, None].expand(B, D), x)), "buffer 'seen'.*scatter_"
    ),
    "slice_scatter": (
        writes(lambda s, x, y: s.seen.copy_(torch.slice_scatter(s.seen, x, 0, 0, B))), "buffer 'seen'"
    ),
    "arithmetic": (writes(lambda s, x, y: s.seen.mul_(0.0).add_(x)), "buffer 'seen'"),
    "lerp_": (writes(lambda s, x, y: s.seen.lerp_(x, 1.0)), "buffer 'seen'.*lerp_"),
    "a draw by the data": (
        writes(lambda s, x, y: s.seen.copy_(torch.bernoulli(x.sigmoid()))), "buffer 'seen'"
    ),
    "a step counter": (writes(_counted), "buffer 'seen'"),
    "an integer buffer": (writes(lambda s, x, y: s.steps.copy_(y[0])), "buffer 'steps'"),
    "an integer buffer and a float": (writes(_through_steps), "buffer '(one|steps)'"),
    "an integer buffer read a step later": (writes(_later), "buffer '(mean|steps)'"),
    "a number of one sample": (writes(lambda s, x, y: s.one.copy_(x[0, 0])), "buffer 'one'"),
    "the largest of all samples": (writes(lambda s, x, y: s.one.copy_(x.max())), "buffer 'one'"),
    "in evaluation alone": (_in_evaluation, "buffer 'seen'"),
    # Averages that are none, or not batch norm's.
    "a plain mean": (writes(lambda s, x, y: s.mean.copy_(x.mean(0))), "buffer 'mean'.*6 means of the data"),
    "sums by class": (
        writes(lambda s, x, y: s.store.copy_(torch.zeros(3, D).index_add(0, y, x))), "buffer 'store'"
    ),
    "a mean that weighs one sample alone": (
        writes(lambda s, x, y: s.mean.copy_((s.first * x).sum(0))), "buffer 'mean'.*by their place"
    ),
    "a product with a row of weights": (
        writes(lambda s, x, y: s.mean.copy_((s.first.T @ x)[0])), "buffer 'mean'.*by their place"
    ),
    "batch norm's statistics elsewhere": (
        writes(lambda s, x, y: (s.normalise(x, s.mean, s.var), s.store[0].copy_(s.mean))), "buffer 'store'"
    ),
    # Batch norm whose statistics are a sample.
    "batch norm of one row": (
        writes(lambda s, x, y: s.normalise(x.reshape(1, B * D, 1).expand(1, B * D, 2), s.wide, s.wide_var)),
        "buffer 'wide'.*batch_norm",
    ),
    "batch norm of one sample, repeated": (
        writes(lambda s, x, y: s.normalise(x[:1].expand(B, D), s.mean, s.var, 1.0)), "buffer 'mean'.*slice"
    ),
    "batch norm with samples for channels": (
        writes(lambda s, x, y: s.normalise(x.T, s.by_row, s.by_row_var)), "buffer 'by_row'"
    ),
    "batch norm of one sample among zeros": (
        writes(lambda s, x, y: s.normalise(x * s.first, s.mean, s.var)), "buffer 'mean'.*by their place"
    ),
    "batch norm of one sample by counting": (
        writes(
            lambda s, x, y: s.normalise(torch.where(torch.arange(B)[:, None] == 3, x, 0.0), s.mean, s.var)
        ),
        "buffer 'mean'.*by their place",
    ),
    "batch norm of what dropout left": (
        writes(lambda s, x, y: s.normalise(F.dropout(x, 0.99), s.mean, s.var)), "buffer 'mean'.*dropout"
    ),
    "batch norm of samples drawn": (
        writes(lambda s, x, y: s.normalise(x * (torch.rand(B, 1) < 0.1), s.mean, s.var)),
        "buffer 'mean'.*chance",
    ),
    "batch norm of sorted samples": (
        writes(lambda s, x, y: s.normalise(x.sort(0).values, s.mean, s.var)), "buffer 'mean'.*sort"
    ),
    "batch norm of samples that attend to each other": (
        writes(lambda s, x, y: s.normalise((1e4 * x @ x.T).softmax(0) @ x, s.mean, s.var)), "buffer 'mean'"
    ),
    "batch norm with a momentum beyond 1": (
        writes(lambda s, x, y: s.normalise(x, s.mean, s.var, 3.0)), "buffer 'mean'.*momentum"
    ),
    "running statistics in a part of a buffer": (
        writes(lambda s, x, y: s.normalise(x, s.store[1], s.store[2])), "batch_norm.*not a buffer of"
    ),
    "batch norm of two samples, repeated": (
        writes(lambda s, x, y: s.normalise(x[:2].repeat(4, 1), s.mean, s.var)), "buffer 'mean'.*slice"
    ),
    # Metrics and losses.
    "metric: an element": (told(lambda s, x, y: x[0, 0]), "metric 'told'.*select"),
    "metric: a maximum": (told(lambda s, x, y: x.max()), "metric 'told'.*max"),
    "metric: the first when sorted": (told(lambda s, x, y: x[:, 0].sort().values[0]), "metric 'told'.*sort"),
    "metric: which sample": (told(lambda s, x, y: x[:, 0].argmax().float()), "metric 'told'.*argmax"),
    "metric: a median": (told(lambda s, x, y: x[:, 0].median()), "metric 'told'.*median"),
    "metric: a product": (told(lambda s, x, y: x[:, 0].exp().prod()), "metric 'told'.*prod"),
    "metric: a norm that picks": (
        told(lambda s, x, y: torch.linalg.vector_norm(x[:, 0], float("inf"))), "metric 'told'.*norm"
    ),
    "metric: weighed by place": (
        told(lambda s, x, y: (s.first[:, 0] * x[:, 0]).mean()), "metric 'told'.*place"
    ),
    "metric: weighed by a softmax over samples": (
        told(lambda s, x, y: (x[:, 0] * (1e4 * x[:, 1]).softmax(0)).sum()), "metric 'told'.*softmax"
    ),
    "metric: pairs": (told(lambda s, x, y: supcon(x, y)), "metric 'told'.*each other"),
    "metric: a buffer of evaluation": (_kept_for_evaluation, "buffer 'wide'|metric 'told'"),
    "loss: a sample alone": (lambda s, x, y: (s.weights[0] * x[0]).sum(), "the loss.*select"),
    "loss: weights by sample": (lambda s, x, y: (s.weights * x).sum(), "the loss.*by their place"),
    "loss: the largest": (lambda s, x, y: (s.weights[0] * x).max(), "the loss.*max"),
    "loss of evaluation": (
        lambda s, x, y: s.plain(x, y) if s.training else x[1, 2] + 0.0, "the loss.*select"
    ),
}  # fmt: skip


def metrics_of(forward: Forward) -> tuple[str, ...]:
    return ("told",) if any("told" in str(c) for c in forward.__code__.co_consts) else ()


def captured(module: nn.Module, inputs: Mapping[str, Tensor], metrics: tuple[str, ...] = ()) -> Captured:
    return capture(module, inputs, None, metrics, tail=False)  # which no refusal is of


@cache
def plain() -> Captured:
    """Graphs that nobody refuses; programs are forged from copies."""
    return captured(Rows(lambda s, x, y: s.plain(x, y)), ROWS)


def programs_of(found: Captured) -> list[StageProgram]:
    model = local_model(found.train, found.evaluation, found.state, TrainingSpec(steps=1, n_micro=1))
    assert model.eval_program is not None
    return [model.program, model.eval_program]


def check_programs(
    found: Captured, programs: list[StageProgram], rule: str = "fedavg", floors: Floors | None = None
) -> None:
    model = local_model(found.train, found.evaluation, found.state, TrainingSpec(steps=1, n_micro=1))
    metas = {name: _meta(tensor) for name, tensor in found.state.items()}
    check_returned(programs, model.inputs, metas, make_strategy(rule, {}), floors or Floors())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused_with_the_buffer_metric_or_loss_named(name: str) -> None:
    forward, expected = HOSTILE[name]
    found = captured(Rows(forward), ROWS, metrics_of(forward))
    with pytest.raises(UnsupportedOp, match=f"(?s){expected}"):
        check_graphs(Federated(), found)


# ---------------------------------------------------------------- forged programs: no capture makes them


def node(target: str, *args: Any, shape: tuple[int, ...] = (B, D), dtype: str = "float32") -> OpNode:
    from atoll.opdag import TensorMeta

    return OpNode("forged", Kind.NON_PARAMETRIC, target, args, (), (TensorMeta(shape, dtype),))


def leaf(source: Source, name: str) -> LeafRef:
    return LeafRef(source, name)


X, WEIGHTS = leaf(Source.INPUT, "x"), leaf(Source.PARAMETER, "weights")


def forged(program: StageProgram, *nodes: OpNode, **changes: Any) -> StageProgram:
    """``program`` with further ops at its end; ``OpRef(-n)`` in them is the n-th from the end."""
    ops = list(program.ops)
    for new in nodes:
        at = ops[-1][0] + 1
        ops.append((at, replace(new, args=_placed(new.args, at))))
    parameters = tuple(dict.fromkeys((*program.parameters, "weights")))
    return replace(program, ops=tuple(ops), parameters=parameters, **changes)


def _placed(args: Any, at: int) -> Any:
    if isinstance(args, tuple):
        return tuple(_placed(item, at) for item in args)
    return OpRef(at + args.op) if isinstance(args, OpRef) and args.op < 0 else args


@dataclass(frozen=True)
class Forgery:
    """Ops at the end of an honest training program, and what the refusal says."""

    nodes: tuple[OpNode, ...]
    says: str
    changes: Mapping[str, Any] = field(default_factory=dict)


FORGED = {
    "a parameter": Forgery(
        (node("aten.copy_.default", WEIGHTS, X),), "parameter 'weights' is written in place"
    ),
    "a parameter through a view": Forgery(
        (
            node("aten.view.default", WEIGHTS, (B * D,), shape=(B * D,)),
            node("aten.view.default", X, (B * D,), shape=(B * D,)),
            node("aten.copy_.default", OpRef(-2), OpRef(-1), shape=(B * D,)),
        ),
        "parameter 'weights' is written in place",
    ),
    "a constant": Forgery(
        (node("aten.copy_.default", leaf(Source.CONSTANT, "seen"), X),),
        "constant 'seen' is written in place",
        {"constants": ("seen",)},
    ),
    "a parameter as running mean": Forgery(
        (
            node(
                "aten.batch_norm.default", X, None, None, leaf(Source.PARAMETER, "vector"), None, True, 0.1,
                1e-5, False,
            ),
        ),
        "parameter 'vector' is written in place",
        {"parameters": ("head.weight", "head.bias", "weights", "vector")},
    ),
    "running statistics that are no buffer": Forgery(
        (
            node("aten.sum.dim_IntList", WEIGHTS, (0,), shape=(D,)),
            node("aten.batch_norm.default", X, None, None, OpRef(-1), None, True, 0.1, 1e-5, False),
        ),
        "running_mean is not a buffer",
    ),
    "an op before what it reads": Forgery(
        (node("aten.relu.default", OpRef(1000)),), "not those of an honest call"
    ),
    "a slice beyond its dims": Forgery(
        (node("aten.slice.Tensor", X, 7, 0, 1),), "not those of an honest call"
    ),
    "an item of a tensor": Forgery((node("builtin.getitem", X, 0),), "not those of an honest call"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_program_is_refused_with_the_reason(name: str) -> None:
    found = plain()
    train, evaluation = programs_of(found)
    forgery = FORGED[name]
    model = local_model(found.train, found.evaluation, found.state, TrainingSpec(steps=1, n_micro=1))
    metas = {**model.metas(), **{n: _meta(found.state[n]) for n in ("weights", "seen", "mean")}}
    metas["vector"] = metas["mean"]
    changed = forged(train, *forgery.nodes)
    changed = replace(changed, **forgery.changes)
    with pytest.raises(UnsupportedOp, match=forgery.says):
        check_returned([changed, evaluation], model.inputs, metas, make_strategy("fedavg", {}), Floors())


def _meta(tensor: Tensor) -> Any:
    from atoll.opdag import TensorMeta

    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def test_an_op_declared_constant_may_not_keep_what_inputs_give() -> None:
    found = plain()
    train, evaluation = programs_of(found)
    changed = forged(train, node("aten.zeros.default", (B, D)), node("aten.copy_.default", OpRef(-1), X))
    changed = replace(changed, constant_ops=frozenset({changed.ops[-2][0]}))
    with pytest.raises(UnsupportedOp, match="declared constant"):
        check_programs(found, [changed, evaluation])


def test_a_graph_that_writes_into_views_without_end_is_refused_in_good_time() -> None:
    found = plain()
    train, evaluation = programs_of(found)
    store = node("aten.zeros.default", (B, D))
    views = [node("aten.alias.default", OpRef(-1)) for _ in range(800)]
    more = [node("aten.copy_.default", OpRef(-1), X) for _ in range(800)]
    with pytest.raises(UnsupportedOp, match=r"too often|honest call"):
        check_programs(found, [forged(train, store, *views, *more), evaluation])


def test_samples_joined_with_themselves_over_and_over_take_no_memory() -> None:
    found = plain()
    train, evaluation = programs_of(found)
    doubled = [
        node("aten.cat.default", (X, X) if not at else (OpRef(-1), OpRef(-1)), shape=(B << (at + 1), D))
        for at in range(40)
    ]
    check_programs(found, [forged(train, *doubled), evaluation])


# ---------------------------------------------------------------- a method's own statistics


class Taking(FedImpro):
    """FedImpro whose statistics are rows."""

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            self.fedimpro_means.copy_(features[: self.classes])
            self.fedimpro_stds.copy_(features[-self.classes :])
            self.fedimpro_counts.add_(1.0)


class Unlabelled(FedImpro):
    """FedImpro whose every sample is a class."""

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        super()._learn(features, torch.arange(len(labels)) % self.classes)


class Split(FedImpro):
    """FedImpro with three features of each sample for a class's three samples."""

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        super()._learn(features.repeat_interleave(3, 0), labels.repeat_interleave(3))


class Overwriting(FedImpro):
    """FedImpro whose features are overwritten once they were looked at."""

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        wide = features.clone()
        super()._learn(wide, labels)
        wide[0].copy_(features[1])


class Scaling(FedImpro):
    """FedImpro whose features change for all samples alike between mean and deviation."""

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        wide = features.clone()
        super()._learn(wide, labels)
        wide.lerp_(features, 0.5)


class Twice(FedImpro):
    """FedImpro that adds a row to its means."""

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        super()._learn(features, labels)
        with torch.no_grad():
            self.fedimpro_means[0].add_(features[0])


class Elsewhere(FedImpro):
    """FedImpro that writes in evaluation too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        if not self.training:
            self.fedimpro_counts.add_(y[: self.classes])
        return loss


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Taking, "'fedimpro_means' is not written as FedImpro's method does"),
        (Unlabelled, "labels that are not one a sample"),
        (Split, "not one a sample|not a sum or mean|not written"),
        (Overwriting, "features that are not one a sample.*by their place"),
        (Scaling, "computed from values that an op overwrites"),
        (Twice, "'fedimpro_means' is written 2 times"),
        (Elsewhere, "'fedimpro_counts' is written 2 times"),
    ],
)
def test_a_buffer_that_bears_a_methods_name_must_hold_what_the_method_measures(
    module: type[FedImpro], says: str
) -> None:
    found = captured(module(Net(), "low", C, batch()["x"]), batch(size=6))
    with pytest.raises(UnsupportedOp, match=says):
        check_graphs(Federated("fedimpro"), found)


def test_a_methods_statistics_go_home_for_that_method_alone_and_of_enough_samples() -> None:
    found = captured(fedimpro(), batch(size=6))
    check_graphs(Federated("fedimpro"), found)
    with pytest.raises(UnsupportedOp, match=r"buffer 'fedimpro_means'.*means of the data"):
        check_graphs(Federated("fedavg"), found)
    few = captured(fedimpro(min_samples=2), batch(size=6))
    with pytest.raises(UnsupportedOp, match=r"classes of 2 samples, 3 are demanded.*min_samples=3"):
        check_graphs(Federated("fedimpro"), few)
    check_programs(few, programs_of(few), "fedimpro", Floors(batch=2))


# ---------------------------------------------------------------- honest graphs


# ---------------------------------------------------------------- who refuses


THIEF = writes(lambda s, x, y: s.seen.copy_(x))


def thief_job() -> Job:
    return Job(
        module=Rows(THIEF),
        example_inputs=ROWS,
        data=Registered("rows", {"x": "x", "y": "y"}),
        training=TrainingSpec(steps=1, n_micro=1, optimizer=SGD),
        federated=Federated(clients=2),
    )


def test_the_owner_is_told_at_submit() -> None:
    with pytest.raises(
        UnsupportedOp, match=r"buffer 'seen' would take data home: op aten.copy_.*test_returned.py"
    ):
        prepare(thief_job())


def test_a_client_refuses_whatever_the_coordinator_let_through(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", min_clients=2)
    training = TrainingSpec(steps=10, n_micro=1, seed=5, optimizer=SGD)
    found = capture(Stealing(), {n: torch.from_numpy(a) for n, a in arrays(8, 0).items()}, training)
    server.found = found
    server.model = local_model(found.train, found.evaluation, found.state, training)
    server.tensors = dict.fromkeys(found.state, "ab" * 32)  # which nobody has: it is refused before
    with pytest.raises(UnsupportedOp, match="buffer 'seen' would take data home"):
        joined(server, tmp_path / "w")
    assert not server.store.asked


class Stealing(Small):
    """The client's own model, and its images."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, 1, 8, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(x)  # type: ignore[operator]
        return super().forward(x, y)


def test_a_simulation_in_one_process_refuses_it_too() -> None:
    training = TrainingSpec(steps=1, n_micro=1, optimizer=SGD)
    found = capture(Rows(THIEF), ROWS, training)
    model = local_model(found.train, found.evaluation, found.state, training)
    rows: dict[str, Any] = {"x": np.zeros((40, D), np.float32), "y": np.zeros(40, np.int64)}
    with pytest.raises(UnsupportedOp, match="buffer 'seen'"):
        LocalFederation(model, Federated(), {"a": rows, "b": rows}, floors=NO_FLOORS)


# ---------------------------------------------------------------- floors


@pytest.mark.parametrize(
    ("samples", "options", "floors", "says"),
    [
        (60, {"min_clients": 1}, Floors(), r"close with 1 updates.*demands 2.*--min-clients 1"),
        (9, {}, Floors(), r"8 samples to train on.*demands 10.*--min-samples 8"),
        (60, {"local_steps": 1}, Floors(), r"1 local steps a round.*demands 2.*--min-steps 1"),
        (14, {}, Floors(), r"1 local steps|1 held-out samples"),
        (20, {"local_epochs": 2}, Floors(), r"2 held-out samples.*demands 3.*--min-batch 2"),
        (60, {}, Floors(batch=9), r"micro-batches of 9"),
    ],
)
def test_a_client_refuses_what_is_below_its_floors(
    tmp_path: Path, samples: int, options: dict[str, Any], floors: Floors, says: str
) -> None:
    server = Server(tmp_path / "server", **{"min_clients": 2, **options})
    with pytest.raises(UsageError, match=says):
        joined(server, tmp_path / "w", samples=samples, floors=floors)


def test_a_data_owner_may_lower_every_floor(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", min_clients=1, local_steps=1, evaluate_every=0)
    joined(server, tmp_path / "w", samples=3, floors=NO_FLOORS)


def test_evaluation_over_too_few_samples_is_refused_whoever_asks_for_it() -> None:
    training = TrainingSpec(steps=1, n_micro=1, seed=5, optimizer=SGD)
    example = {n: torch.from_numpy(a) for n, a in arrays(8, 0).items()}
    found = capture(Small(), example, training)
    model = local_model(found.train, found.evaluation, found.state, training)
    federation = LocalFederation(model, Federated(evaluate_every=0), {"a": arrays(20, 1), "b": arrays(60, 2)})
    assert federation.evaluate_clients(["b"])["b"].n_samples == 6
    with pytest.raises(UsageError, match="2 held-out samples in a mean"):
        federation.evaluate_clients(["a"])


def test_a_class_may_not_be_one_sample_several_times() -> None:
    training = TrainingSpec(steps=1, n_micro=1, seed=5, optimizer=SGD)
    found = capture(fedimpro(), batch(size=12), training)
    model = local_model(found.train, found.evaluation, found.state, training)
    federated = Federated("fedimpro", local_epochs=2, evaluate_every=0, held_out=0.0)
    few = {n: t.numpy() for n, t in batch(size=11).items()}
    enough = {n: t.numpy() for n, t in batch(size=12).items()}
    clients = {"few": few, "enough": enough}
    federation = LocalFederation(model, federated, clients, floors=Floors(statistics=115))
    broadcast = federation.strategy.configure(federation.state)
    federation.trainer.train(federation.clients["enough"], broadcast, federation.client_states["enough"])
    with pytest.raises(UsageError, match="11 samples repeat within a micro-batch of 12"):
        federation.trainer.train(federation.clients["few"], broadcast, federation.client_states["few"])


def test_floors_have_bounds() -> None:
    for name in ("batch", "samples", "steps", "clients"):
        with pytest.raises(UsageError, match=f"--min-{name}.*from 1"):
            Floors(**{name: 0})
