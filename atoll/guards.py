"""Checks of a call's shapes and literals, where a kernel trusts one argument for the size of another.

Torch checks most of what its kernels assume, and the fuzz (``tests/fuzz``) finds what it does not: those
ops have a guard here, on shapes alone, so that a program is judged before anything runs. What depends on
values is in ``atoll.value_guards``. Bounds on window sizes and counts keep torch's own shape
computation short: it is run on fake tensors and cannot be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.calls import call_of
from atoll.opdag import LeafRef, OpRef, TorchLiteral
from atoll.ops import GETITEM, MAX_OUTPUTS, refusal

if TYPE_CHECKING:
    from atoll.calls import Call, Shapes
    from atoll.opdag import OpNode

Guard = Callable[["Call"], None]
MAX_WINDOW = 1 << 20  # of a kernel, stride, dilation or padding
MAX_EXTRA_STEP = 64  # of a stride or dilation, beyond the padded input
MAX_LAYERS = 1 << 10  # of one recurrent op
MAX_POWER = 1 << 20  # of a matrix
MAX_GAMMAS = 256  # that one multivariate gamma multiplies
MAX_CHOSEN = 16  # elements of a combination
_WINDOWS = {
    "kernel_size": 1,
    "stride": 1,
    "dilation": 1,
    "padding": -MAX_WINDOW,
    "pad": -MAX_WINDOW,
    "output_padding": 0,
    "groups": 1,
    "num_groups": 1,
    "group": 1,
    "upscale_factor": 1,
    "downscale_factor": 1,
    "divisor_override": 1,
}


def check_call(node: OpNode, shapes: Shapes) -> None:
    """Refuse a node whose arguments do not fit its schema or each other. UnsupportedOp names the argument."""
    call = call_of(node, shapes)
    if node.target == GETITEM:
        _getitem(node, shapes)
        return
    _windows(call)
    for guard in GUARDS.get(call.name, ()):
        guard(call)


def _windows(call: Call) -> None:
    for name, least in _WINDOWS.items():
        for value in call.numbers(name):
            if not least <= value <= MAX_WINDOW:
                raise call.refuse(f"argument {name!r} is {value}; {least} to {MAX_WINDOW} are accepted")


def _getitem(node: OpNode, shapes: Shapes) -> None:
    source, index = node.args
    found = shapes.of(source)  # type: ignore[arg-type]
    if found is None or not isinstance(index, int) or index >= len(found):
        raise refusal(node, f"it takes element {index} of {0 if found is None else len(found)}")


GUARDS: dict[str, list[Guard]] = {}


def _guards(*names: str) -> Callable[[Guard], Guard]:
    """Register a guard for every overload, in place or not, of the ops called ``names``."""

    def register(guard: Guard) -> Guard:
        for name in names:
            GUARDS.setdefault(name, []).append(guard)
        return guard

    return register


# ---------------------------------------------------------------- how many tensors come out


@_guards("unbind")
def _unbind(call: Call) -> None:
    shape, dim = call.tensor("self").shape, call.number("dim", 0)
    if not -len(shape) <= dim < len(shape):
        raise call.refuse(f"dimension {dim} of a tensor of {len(shape)}")
    _count(call, shape[dim])


@_guards("split", "unsafe_split")
def _split(call: Call) -> None:
    size = call.given.get("split_size")
    if isinstance(size, int):
        shape, dim = call.tensor("self").shape, call.number("dim", 0)
        if size < 0 or not -len(shape) <= dim < len(shape):
            raise call.refuse(f"parts of {size} along dimension {dim} of {shape}")
        _count(call, -(-shape[dim] // size) if size else 1)


@_guards("chunk", "unsafe_chunk")
def _chunk(call: Call) -> None:
    _count(call, call.number("chunks", 1))


@_guards("tensor_split", "hsplit", "vsplit", "dsplit")
def _sections(call: Call) -> None:
    _count(call, call.number("sections", 1))


def _count(call: Call, parts: int) -> None:
    if parts > MAX_OUTPUTS:
        raise call.refuse(f"it makes {parts} tensors, at most {MAX_OUTPUTS} are accepted")


# ---------------------------------------------------------------- normalisation


@_guards("_grouped_mm")
def _grouped_mm(call: Call) -> None:
    rows, matrices, offs = call.meta("self"), call.meta("mat2"), call.meta("offs")
    other = call.given.get("bias") is not None or call.given.get("out_dtype") is not None
    if rows is None or matrices is None or offs is None or other:
        raise call.refuse("rows, matrices and offsets are taken, nothing else")
    if (len(rows.shape), len(matrices.shape), len(offs.shape)) != (2, 3, 1):
        raise call.refuse(f"rows of shape {rows.shape} by {matrices.shape} in groups of {offs.shape}")
    if matrices.shape[0] != offs.shape[0] or not matrices.shape[0] or rows.shape[1] != matrices.shape[1]:
        raise call.refuse(f"rows of shape {rows.shape} by {matrices.shape} in groups of {offs.shape}")
    if offs.dtype != "int32" or rows.dtype != matrices.dtype:
        raise call.refuse(f"{rows.dtype} by {matrices.dtype} with offsets of {offs.dtype}")


@_guards("_weight_norm")
def _weight_norm(call: Call) -> None:
    v, g, dim = call.tensor("v"), call.tensor("g"), call.number("dim", 0)
    if not v.shape or not -1 <= dim < len(v.shape):
        raise call.refuse(f"dimension {dim} of a weight of shape {v.shape}")
    due = tuple(size if at == dim else 1 for at, size in enumerate(v.shape))
    if dim == -1:
        due = (1,) * len(v.shape)
    if g.dtype != v.dtype or (g.shape != due and not (dim == -1 and g.elements == 1)):
        raise call.refuse(f"'g' is {g.dtype} of shape {g.shape}; {v.dtype} of {due} is due")


@_guards("native_group_norm")
def _native_group_norm(call: Call) -> None:
    shape = call.tensor("input").shape
    n, c, area = (call.number(name, -1) for name in ("N", "C", "HxW"))
    if len(shape) < 2 or (n, c, area) != (shape[0], shape[1], math.prod(shape[2:])):
        raise call.refuse(f"N, C, HxW are {(n, c, area)}; the input's shape is {shape}")


@_guards("batch_norm", "instance_norm")
def _running_statistics(call: Call) -> None:
    shape = call.tensor("input").shape
    channels = shape[1] if len(shape) > 1 else 0
    for name in ("weight", "bias", "running_mean", "running_var"):
        meta = call.meta(name)
        if meta is not None and meta.shape != (channels,):
            raise call.refuse(f"{name!r} has shape {meta.shape}; ({channels},) is due")


# ---------------------------------------------------------------- attention and recurrence


@_guards("scaled_dot_product_attention")
def _attention(call: Call) -> None:
    """Each key has its value: the CPU's kernel reads as many of one as there are of the other."""
    query, key, value = (call.tensor(name).shape for name in ("query", "key", "value"))
    if min(len(query), len(key), len(value)) < 2 or key[:-1] != value[:-1] or query[-1] != key[-1]:
        raise call.refuse(f"queries of shape {query}, keys of {key} and values of {value}")


@_guards("lstm", "gru", "rnn_relu", "rnn_tanh")
def _recurrence(call: Call) -> None:
    packed = "data" in call.given
    source = call.tensor("data" if packed else "input")
    if packed and not call.tensor("batch_sizes").elements:
        raise call.refuse("its batch sizes are empty")
    wanted_dims = (2,) if packed else (2, 3)
    if len(source.shape) not in wanted_dims:
        raise call.refuse(f"its input has {len(source.shape)} dimensions; {wanted_dims} are taken")
    layers, both_ways = call.number("num_layers", 1), 2 if call.given.get("bidirectional") else 1
    if not 1 <= layers <= MAX_LAYERS:
        raise call.refuse(f"{layers} layers; 1 to {MAX_LAYERS} are accepted")
    states = call.tensors("hx")
    gates = {"lstm": 4, "gru": 3}.get(call.name, 1)
    if len(states) != (2 if call.name == "lstm" else 1):
        raise call.refuse(f"{len(states)} hidden states")
    hidden = _hidden_size(call, gates)
    projected = states[0].shape[-1] if states[0].shape else -1
    batch = _batch(call, packed)
    for meta, size in zip(states, (projected, hidden), strict=False):
        due = (layers * both_ways, *(() if batch is None else (batch,)), size)
        wrong = len(meta.shape) != len(due) or any(
            b >= 0 and a != b for a, b in zip(meta.shape, due, strict=True)
        )
        if wrong or meta.dtype != source.dtype:
            raise call.refuse(
                f"a hidden state is {meta.dtype} of shape {meta.shape}; {source.dtype} of {due} is due"
            )
    if call.name != "lstm" and projected != hidden:
        raise call.refuse(f"a hidden state of {projected} beside weights of {hidden}")
    _recurrent_weights(call, source.shape[-1], hidden, projected, gates, layers, both_ways)


def _hidden_size(call: Call, gates: int) -> int:
    weights = call.tensors("params")
    if not weights or len(weights[0].shape) != 2 or weights[0].shape[0] % gates:
        raise call.refuse("its first weight is no matrix of whole gates")
    return weights[0].shape[0] // gates


def _batch(call: Call, packed: bool) -> int | None:
    """Sequences in a batch; -1 where values say it, None for a single sequence without a batch."""
    if packed:
        return -1
    shape = call.tensor("input").shape
    return None if len(shape) == 2 else shape[0 if call.given.get("batch_first") else 1]


def _recurrent_weights(
    call: Call, features: int, hidden: int, projected: int, gates: int, layers: int, both_ways: int
) -> None:
    biases = 2 if call.given.get("has_biases") else 0
    due: list[tuple[int, ...]] = []
    for layer in range(layers):
        entering = features if layer == 0 else projected * both_ways
        one = [(gates * hidden, entering), (gates * hidden, projected), *[(gates * hidden,)] * biases]
        if projected != hidden:
            one.append((projected, hidden))
        due += one * both_ways
    found = [meta.shape for meta in call.tensors("params")]
    if found != due:
        if len(found) != len(due):
            raise call.refuse(f"{len(found)} weights, {len(due)} are due")
        wrong = next(at for at, (a, b) in enumerate(zip(found, due, strict=True)) if a != b)
        raise call.refuse(f"weight {wrong} has shape {found[wrong]}, {due[wrong]} is due")
    if len({meta.dtype for meta in call.tensors("params")}) != 1:
        raise call.refuse("its weights differ in dtype")


# ---------------------------------------------------------------- resampling


@_guards(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
def _scales(call: Call) -> None:
    """A scale that is given is the one between the two sizes: the kernel reads by it."""
    source = call.tensor("input" if "input" in call.given else "self").shape[2:]
    if not call.node.outputs:
        return
    made = call.node.outputs[0].shape[2:]
    names = ("scales_d", "scales_h", "scales_w")[-len(source) :] if len(source) > 1 else ("scales",)
    listed = call.given.get("scale_factors")
    given = listed if isinstance(listed, tuple) else tuple(call.given.get(name) for name in names)
    if len(source) != len(made) or (isinstance(listed, tuple) and len(listed) != len(source)):
        raise call.refuse(f"from {source} to {made} by {listed}")
    for scale, before, after in zip(given, source, made, strict=False):
        if isinstance(scale, int | float) and not _scales_to(scale, before, after):
            raise call.refuse(f"a scale of {scale} from {before} to {after}")


def _scales_to(scale: float, before: int, after: int) -> bool:
    # Torch takes the whole part; the scale may be a rounded quotient.
    return math.isfinite(scale) and after * (1 - 1e-6) <= before * scale < after + 1


# ---------------------------------------------------------------- windows


@_guards(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices", "im2col", "conv_tbc",
)  # fmt: skip
def _steps(call: Call) -> None:
    """A step far beyond the input makes a kernel's preparation loop, and the result no larger."""
    source = call.tensor("input" if "input" in call.given else "self").shape
    padding = max((abs(int(value)) for value in call.numbers("padding")), default=max(source, default=0))
    most = MAX_EXTRA_STEP + max(source, default=0) + 2 * padding
    for name in ("stride", "dilation"):
        for value in call.numbers(name):
            if value > most:
                raise call.refuse(f"a {name} of {value} over an input of shape {source}")


@_guards(
    "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
    "max_pool3d_with_indices",
)  # fmt: skip
def _taps(call: Call) -> None:
    """Each window has a value inside the input: the backward writes where the index of the largest says."""
    shape, dilations = call.tensor("self").shape, [int(d) for d in call.numbers("dilation")]
    space = shape[-int(call.name[8]) :]
    if any(dilation > size for size, dilation in zip(space, dilations * len(space), strict=False)):
        raise call.refuse(f"dilations of {dilations} over an input of shape {shape}")


# ---------------------------------------------------------------- others


@_guards(
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "pad",
)  # fmt: skip
def _mirrored(call: Call) -> None:
    """A negative reflection leaves a part of the result as memory was; only constants may crop."""
    if call.given.get("mode", "constant" if call.name == "pad" else "") != "constant":
        for value in call.numbers("pad" if call.name == "pad" else "padding"):
            if value < 0:
                raise call.refuse(f"a padding of {value}; only a constant one may be negative")


@_guards("view")
def _reinterpreted(call: Call) -> None:
    """A bool other than 0 and 1 is undefined to a compiler; bits are not made one."""
    made = call.given.get("dtype")
    if isinstance(made, TorchLiteral) and "bool" in (made.name, call.tensor("self").dtype):
        raise call.refuse("bits are not taken for bools, nor bools for bits")


@_guards("embedding", "embedding_bag", "gather")
def _dense_gradients(call: Call) -> None:
    for name in ("sparse", "sparse_grad"):
        if call.given.get(name):
            raise call.refuse(f"{name}=True asks for sparse gradients, which no optimizer here takes")


@_guards("mvlgamma")
def _mvlgamma(call: Call) -> None:
    """It makes a tensor as many times as large, which its fake kernel does not show."""
    if not 1 <= call.number("p", 1) <= MAX_GAMMAS:
        raise call.refuse(f"'p' is {call.number('p', 1)}; 1 to {MAX_GAMMAS} are accepted")


@_guards("combinations")
def _combinations(call: Call) -> None:
    """Bound the combinations: shapes alone take a loop over the elements of each combination, squared."""
    if not 0 <= call.number("r", 2) <= MAX_CHOSEN:
        raise call.refuse(f"combinations of {call.number('r', 2)}; 0 to {MAX_CHOSEN} are accepted")


@_guards("matrix_power", "linalg_matrix_power")
def _matrix_power(call: Call) -> None:
    if abs(call.number("n", 1)) > MAX_POWER:
        raise call.refuse(f"the power {call.number('n', 1)}; at most {MAX_POWER} is accepted")


@_guards("embedding_bag")
def _embedding_bag(call: Call) -> None:
    indices, offsets = call.tensor("indices").shape, call.tensor("offsets").shape
    if len(indices) != 1 or len(offsets) != 1 or not offsets[0]:
        raise call.refuse(f"indices of shape {indices} and offsets of {offsets}; (n,) and (bags,) are due")
    weights = call.meta("per_sample_weights")
    if weights is not None and weights.shape != call.tensor("indices").shape:
        raise call.refuse(f"'per_sample_weights' has shape {weights.shape}")


@_guards("ctc_loss")
def _ctc_loss(call: Call) -> None:
    shape, targets = call.tensor("log_probs").shape, call.tensor("targets").shape
    if len(shape) not in (2, 3) or len(targets) not in (1, 2):
        raise call.refuse(f"log probabilities of shape {shape} and targets of shape {targets}")
    if not 0 <= call.number("blank", 0) < shape[-1]:
        raise call.refuse(f"the blank {call.number('blank', 0)} of {shape[-1]} classes")
    batch = shape[1] if len(shape) == 3 else 1
    if len(targets) == 2 and targets[0] != batch:
        raise call.refuse(f"targets of shape {targets} for a batch of {batch}")
    reading, read = call.numbers("input_lengths"), call.numbers("target_lengths")
    most = targets[1] if len(targets) == 2 else targets[0]
    if any(not 0 <= n <= shape[0] for n in reading) or any(not 0 <= n <= most for n in read):
        raise call.refuse(f"lengths {reading[:4]} of {shape[0]} and {read[:4]} of {most}")
    if reading and (len(reading) != batch or len(read) != batch):
        raise call.refuse(f"{len(reading)} and {len(read)} lengths for a batch of {batch}")
    if len(targets) == 1 and read and sum(read) != targets[0]:
        raise call.refuse(f"target lengths of {sum(read)} in all for {targets[0]} targets")


@_guards("repeat_interleave")
def _repeat_interleave(call: Call) -> None:
    repeats = call.meta("repeats")
    by_values = isinstance(call.given.get("repeats"), OpRef | LeafRef)
    if by_values and repeats is not None and repeats.dtype not in ("int32", "int64"):
        raise call.refuse(f"'repeats' is {repeats.dtype}; int32 or int64 is due")
    if by_values and not isinstance(call.given.get("output_size"), int):
        raise call.refuse("its size depends on values; 'output_size' is due")
