"""The client half of a strategy inside any Flower ClientApp: one call for a round, one for an evaluation.

    @app.train()
    def train(message, context):
        def local(work):                        # once a phase; most strategies have one
            model.load_state_dict(tensors(work.start))
            correction = work.correction.mapped(torch.from_numpy)
            for epoch in range(epochs):
                ...                             # loss.backward()
                correct(model, correction)      # before optimizer.step()
            return Done(arrays(model), n_samples, steps, lr, metrics={"train_loss": loss})
        return local_round(message, context, arrays(model), local)

Which strategy, with which options, is what the server's strategy says (``strategies.flower``), from our own
strategies by name; no code travels. Under a stock strategy the same ClientApp trains plainly.

A client's state is kept in ``Context.state`` as soon as the reply is made: Flower does not tell a node
whether its reply was taken. Flower keeps a Context in memory only and gives an unauthenticated node a
new one at each start, so such a node begins anew, which every strategy allows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from atoll.errors import BadUpdate
from strategies import flower_records as words
from strategies import make_strategy
from strategies.base import Strategy
from strategies.checking import check_broadcast, check_update
from strategies.files import slot_arrays, slots_of
from strategies.layout import SHARED, Layout, Role, meta_of
from strategies.values import Broadcast, ClientState, ClientUpdate, Correction, Done

if TYPE_CHECKING:
    from strategies.layout import Array as NumpyArray
    from strategies.layout import Arrays

EXAMPLES = "num-examples"


@dataclass(frozen=True)
class LocalWork:
    """A local training. ``start``: every tensor of the model as training begins."""

    round: int  # from 0
    phase: int  # the first is the one that is uploaded
    start: dict[str, NumpyArray]
    correction: Correction
    config: Mapping[str, Any]  # the request's, "server-round" among it
    at_epoch: Callable[[int], Arrays]
    """Local epoch, from 0 -> buffers to set at its start; empty for most strategies."""


Train = Callable[[LocalWork], Done]


@dataclass(frozen=True)
class _Request:
    """Content of a request, read and checked."""

    rule: Strategy
    layout: Layout
    broadcast: Broadcast
    config: ConfigRecord
    arrays_key: str
    stock: bool  # a strategy that is not ours asks


def local_round(
    message: Message, context: Context, model: Arrays, train: Train, *, seed: int | None = None
) -> Message:
    """Train as the server's strategy says, and the reply. ``model``: every tensor of the local model.

    ``train`` is called once a phase. ``seed``: of noise that a strategy adds here, by default drawn anew.
    BadUpdate for a request that is not what the strategy sends, or an answer that it would refuse.
    """
    asked = _request(message, model)
    state = _state(context)
    done = []
    for at, phase in enumerate(asked.rule.begin(asked.layout, asked.broadcast, state)):
        start = {name: np.array(array) for name, array in {**model, **phase.start}.items()}
        correction = phase.correction.mapped(np.array)  # torch wants memory that it may write to
        at_epoch = partial(asked.rule.at_epoch, asked.layout, asked.broadcast)
        work = LocalWork(asked.broadcast.round, at, start, correction, dict(asked.config), at_epoch)
        done.append(train(work))
    own = secrets.randbits(63) if seed is None else seed
    update, after = asked.rule.end(asked.layout, asked.broadcast, done, state, own)
    check_update(asked.rule, asked.layout, asked.broadcast.round, update)
    context.state[words.STATE] = words.to_record(slot_arrays(after.slots))
    return Message(content=_content(message, asked, done[0], update), reply_to=message)


def evaluation_arrays(message: Message, context: Context, model: Arrays) -> dict[str, NumpyArray]:
    """Every tensor of the model as this client should evaluate it: the common one, or its own."""
    asked = _request(message, model, evaluating=True)
    found = asked.rule.evaluate_with(asked.broadcast, _state(context))
    return {name: np.array(array) for name, array in {**model, **found}.items()}


def correct(module: Any, correction: Correction) -> None:
    """Correct the gradients of a torch module in place; call between backward and the optimizer's step.

    ``correction`` holds the module's own tensors: ``work.correction.mapped(torch.from_numpy)``.
    """
    if correction:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                parameter.grad = correction.gradient(name, parameter.grad, parameter.detach())


def trained_names(module: Any) -> list[str]:
    """Names of a torch module's parameters that have gradients."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _request(message: Message, model: Arrays, *, evaluating: bool = False) -> _Request:
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    keys = [key for key in message.content.array_records if key != words.EXTRA]
    if len(keys) != 1:
        raise BadUpdate(f"a request with {len(keys)} records of weights; expected one")
    received = words.from_record(message.content.array_records[keys[0]])
    stock = words.STRATEGY not in config
    if stock:  # Flower's strategies average integer counters too, and send them back as floats
        received = {n: a.astype(model[n].dtype) if n in model else a for n, a in received.items()}
        rule, at_round = make_strategy("fedavg"), 0
        trained, averaged = words.roles_of(model, {n: a.dtype for n, a in model.items()})
    else:
        rule = make_strategy(str(config[words.STRATEGY]), words.options_of(config.get(words.OPTIONS)))
        at_round = words.whole_number(config, words.ROUND)
        trained, averaged = words.names_in(config, words.TRAINED), words.names_in(config, words.AVERAGED)
    layout = rule.adapt(Layout.of(model, trained, averaged))
    sent = layout.metas_of(*SHARED, Role.TOLD)
    _check_rest(received, layout)
    extra = message.content.array_records.get(words.EXTRA, ArrayRecord())
    slots = slots_of(words.from_record(extra))
    missing = [name for name in sent if name not in received]
    if missing:
        raise BadUpdate(f"the server sent {len(received)} arrays without {missing[0]!r}")
    broadcast = Broadcast(at_round, {name: received[name] for name in sent}, slots)
    if not evaluating:  # which goes without the strategy's extra arrays
        check_broadcast(rule, layout, broadcast)
    return _Request(rule, layout, broadcast, config, keys[0], stock)


def _check_rest(received: Arrays, layout: Layout) -> None:
    """BadUpdate for an array that the local model does not have, or has in another shape."""
    for name, array in received.items():
        known = layout.metas.get(name)
        if known is None or known != meta_of(array):
            have = "none" if known is None else f"{known.dtype} {known.shape}"
            raise BadUpdate(f"the server's {name[:128]!r} is {array.dtype} {array.shape}; here {have}")


def _state(context: Context) -> ClientState:
    kept = context.state.array_records.get(words.STATE)
    return ClientState() if kept is None else ClientState(slots_of(words.from_record(kept)))


def _content(message: Message, asked: _Request, first: Done, update: ClientUpdate) -> RecordDict:
    """Return an ArrayRecord and a MetricRecord, as every strategy of Flower expects."""
    metrics: dict[str, Any] = {name: float(value) for name, value in update.metrics.items()}
    metrics[EXAMPLES] = update.n_samples
    if asked.stock:
        names = list(message.content.array_records[asked.arrays_key])
        extra: dict[str, NumpyArray] = {}
    else:
        names = list(update.delta)
        extra = slot_arrays(update.extra, f"{words.EXTRA}/")
        metrics[words.STEPS] = update.steps
        metrics |= {words.OWN + name: float(value) for name, value in update.scalars.items()}
    weights = {name: first.weights[name] for name in names}
    return RecordDict(
        {
            asked.arrays_key: words.to_record({**weights, **extra}),
            "metrics": MetricRecord(metrics),
        }
    )
