"""torch.export's graph as our nodes: one flat list in graph order, sub-graphs inlined.

The module is exported with its loss inside the root, in the training or evaluation mode and the
precision it will run in, and is left as it was found. What cannot be captured is refused with
the op, the module path and the source line.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.errors import CaptureError
from atoll.exported import exported
from atoll.job import Precision
from atoll.opdag import (
    DTYPE_BYTES,
    Arg,
    Autocast,
    Kind,
    LeafRef,
    OpNode,
    OpRef,
    Source,
    TensorMeta,
    TorchLiteral,
)
from atoll.ops import GETITEM
from coordinator.capture.export_errors import blame, remedies
from coordinator.capture.outcome import Loss, modes_kept
from coordinator.capture.python_state import PythonState
from coordinator.capture.stock import densely, followable, listed, without_out
from coordinator.capture.unseen import mode_reads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ROOT = "module"  # the wrapper's only child; stripped from every name
_DROPPED = re.compile(r"aten\.(_assert_|_functional_assert_|sym_constrain_range|_functional_sym_constrain)")
MAX_NAMED = 5  # sub-modules in one message
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THE_OWNERS = re.compile(
    r"[/\\]torch[/\\]|[/\\]atoll[/\\]exported\.py$|[/\\]coordinator[/\\]capture[/\\]outcome\.py$"
)


@dataclass
class Constants:
    """Tensors lifted from both graphs of a module, equal ones once."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)  # on the memory on which the module holds them

    def name_of(self, value: Tensor) -> str:
        """Return the name that the graphs read it by; CaptureError where it is not dense."""
        check_dense("a tensor that forward reads", value)
        self.held.append(value)
        for name, known in self.tensors.items():
            if known.dtype == value.dtype and torch.equal(known, value):
                return name
        name = f"constant/{len(self.tensors)}"
        self.tensors[name] = value.detach().clone()
        return name


def check_dense(what: str, tensor: Tensor) -> None:
    """CaptureError for a sparse tensor, which does not travel."""
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"{what} is {str(tensor.layout).removeprefix('torch.')}; keep it dense (.to_dense()), or its "
            "indices and values as buffers of their own, for index_add or scatter_add"
        )


@dataclass(frozen=True)
class Exported:
    """Nodes in graph order (``OpRef`` counts them) with provisional metas; their loss, perhaps its weight."""

    nodes: list[OpNode]
    loss: int
    metrics: Mapping[str, int] = field(default_factory=dict)
    weight: int | None = None
    reads_mode: bool = True  # the module's ``training``, or it is not known


def left_in_evaluation(modes: Collection[tuple[nn.Module, bool]]) -> list[nn.Module]:
    """Modules of these that stay in evaluation mode in training: none where all are in it."""
    if not any(training for _, training in modes):
        return []
    return [child for child, training in modes if not training]


def modes_in_words(module: nn.Module) -> list[str]:
    """Say in which modes the module is trained, where that is not training mode as it was given."""
    if not any(part.training for part in module.modules()):
        return [
            "the module is in evaluation mode as a whole; it is trained in training mode, as after train()"
        ]
    left = [name for name, part in module.named_modules() if not part.training]
    tops = [name for name in left if not any(name.startswith(f"{above}.") for above in left)]
    if not tops:
        return []
    named = ", ".join(tops[:MAX_NAMED]) + (
        f" and {len(tops) - MAX_NAMED} more" if len(tops) > MAX_NAMED else ""
    )
    return [f"left in evaluation mode, and trained in it: {named or 'the module itself'}"]


@contextmanager
def as_trained(module: nn.Module, training: bool, frozen: Collection[str]) -> Iterator[None]:
    """The module in one mode, with ``frozen`` parameters out of autograd; restored at the end.

    In evaluation all sub-modules are in evaluation mode. Training is ``module.train()`` but for those that
    the owner left in evaluation mode, such as a frozen batch norm; a module that is in evaluation mode as a
    whole, as ``from_pretrained`` returns it, trains as a whole.
    """
    flags = [(p, p.requires_grad) for p in module.parameters()]
    by_name = dict(module.named_parameters(remove_duplicate=False))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        with modes_kept(module) as modes:
            module.train(training)
            for child in left_in_evaluation(modes) if training else ():
                child.training = False
            for name in frozen:
                by_name[name].requires_grad_(False)
            # The fused encoder of evaluation mode is one opaque op; its plain form can be cut.
            torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def export(
    wrapped: Loss,
    inputs: Mapping[str, Tensor],
    *,
    training: bool,
    precision: Precision,
    frozen: Collection[str],
    canonical: Mapping[str, str],
    constants: Constants,
) -> Exported:
    """Capture one graph; CaptureError where torch cannot follow the module."""
    module = wrapped.module
    device = device_of(module, inputs)
    with ExitStack() as stack:
        stack.callback(PythonState(module).restore)
        stack.enter_context(as_trained(module, training, frozen))
        reads_mode = stack.enter_context(mode_reads(module))
        stack.enter_context(followable(module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng())
        if precision is Precision.BF16:
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, cache_enabled=False))
        try:
            program = exported(wrapped, tuple(inputs.values()))
        except CaptureError:
            raise
        except Exception as error:  # torch.export raises whatever the module raised
            raise blame(error, module) from error
        asked = reads_mode()
    found = _Flattener(program, tuple(inputs), device, canonical, constants).flatten(wrapped.metrics)
    return replace(found, reads_mode=asked)


def device_of(module: nn.Module, inputs: Mapping[str, Tensor]) -> torch.device:
    """Return the module's device: of its first parameter or buffer, else of the first input."""
    for tensor in (*module.parameters(), *module.buffers(), *inputs.values()):
        return tensor.device
    return torch.device("cpu")


def meta_of(value: Any, where: str) -> TensorMeta:
    """Static meta of a tensor; CaptureError for a data-dependent shape or an unknown dtype."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise CaptureError(
            f"{where}: tensors of type {dtype} are not supported; use one of {sorted(DTYPE_BYTES)}"
        )
    if any(not isinstance(size, int) for size in value.shape):
        raise CaptureError(
            f"{where}: the result's shape depends on the data; use a form with a fixed shape, such as "
            "torch.where or a mask"
        )
    return TensorMeta(tuple(value.shape), dtype)


class _Flattener:
    def __init__(
        self,
        program: torch.export.ExportedProgram,
        inputs: tuple[str, ...],
        device: torch.device,
        canonical: Mapping[str, str],
        constants: Constants,
    ) -> None:
        self.program = program
        self.inputs = inputs
        self.device = device
        self.canonical = canonical
        self.constants = constants
        self.nodes: list[OpNode] = []
        self.names: set[str] = set()

    def flatten(self, metrics: tuple[str, ...]) -> Exported:
        module = self.program.graph_module
        env = {node: self.leaf(node.name) for node in module.graph.nodes if node.op == "placeholder"}
        loss, *others = self.walk(module, env, True, None)
        if not isinstance(loss, OpRef):
            raise CaptureError("the loss is an input or a parameter itself; nothing can be trained")
        # Copies (``Loss``), so each is an op's.
        positions = [value.op for value in others]
        weight = positions.pop() if len(positions) > len(metrics) else None
        return Exported(self.nodes, loss.op, dict(zip(metrics, positions, strict=True)), weight)

    def leaf(self, placeholder: str) -> LeafRef | None:
        signature = self.program.graph_signature
        if placeholder in signature.inputs_to_parameters:
            return LeafRef(Source.PARAMETER, self.state_name(signature.inputs_to_parameters[placeholder]))
        if placeholder in signature.inputs_to_buffers:
            return LeafRef(Source.BUFFER, self.state_name(signature.inputs_to_buffers[placeholder]))
        if placeholder in signature.inputs_to_lifted_tensor_constants:
            target = signature.inputs_to_lifted_tensor_constants[placeholder]
            return LeafRef(Source.CONSTANT, self.constants.name_of(self.program.constants[target]))
        if placeholder in signature.user_inputs:
            return LeafRef(Source.INPUT, self.inputs[signature.user_inputs.index(placeholder)])
        return None  # a token or custom object: refused where an op reads it

    def state_name(self, exported: str) -> str:
        name = exported.removeprefix(f"{ROOT}.")
        return self.canonical.get(name, name)

    def walk(self, module: Any, env: dict[Any, Any], grad: bool, autocast: Autocast | None) -> Any:
        """Append the module's ops; return its outputs as arguments."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                env[node] = self.attribute(operator.attrgetter(node.target)(module))
            elif node.op == "call_function":
                env[node] = self.call(node, env, grad, autocast)
            elif node.op == "output":
                return self.values(node.args[0], env)
        raise CaptureError("the exported graph has no output")

    def attribute(self, value: object) -> object:
        return LeafRef(Source.CONSTANT, self.constants.name_of(value)) if isinstance(value, Tensor) else value

    def values(self, args: Any, env: dict[Any, Any]) -> Any:
        if isinstance(args, torch.fx.Node):
            return env[args]
        if isinstance(args, tuple | list):
            return tuple(self.values(arg, env) for arg in args)
        return args

    def call(self, node: Any, env: dict[Any, Any], grad: bool, autocast: Autocast | None) -> Any:
        target = target_name(node.target)
        args = self.values(node.args, env)
        if target == "higher_order.wrap_with_set_grad_enabled":
            return self.inline(args[1], args[2:], bool(args[0]), autocast)
        if target == "higher_order.wrap_with_autocast":
            device_type, dtype, enabled, _, inner, *rest = args
            if device_type == self.device.type:  # another device's region changes nothing here
                name = str(dtype or torch.get_autocast_dtype(device_type)).removeprefix("torch.")
                autocast = Autocast(bool(enabled), name)
            return self.inline(inner, rest, grad, autocast)
        if target.startswith("higher_order."):
            raise CaptureError("; ".join((f"op {target} is not captured", *remedies(target))))
        if target == GETITEM and not isinstance(args[0], OpRef):
            return args[0][args[1]]
        if _DROPPED.match(target):
            return None
        kwargs = {name: self.values(value, env) for name, value in node.kwargs.items()}
        plain = without_out(target) if "out" in kwargs else None
        if plain is None:
            return self.append(node, listed(target), densely(target, args), kwargs, grad, autocast)
        returning, of_the_written = plain
        written = kwargs.pop("out")
        own = {"dtype": node.meta["val"].dtype, "device": self.device}
        kwargs |= {name: own[name] for name in of_the_written}
        result = self.append(node, returning, args, kwargs, grad, autocast)
        return self.append(node, "aten.copy_.default", (written, result), {}, grad, autocast)

    def inline(self, inner: Any, args: Any, grad: bool, autocast: Autocast | None) -> Any:
        holes = [node for node in inner.graph.nodes if node.op == "placeholder"]
        return self.walk(inner, dict(zip(holes, args, strict=True)), grad, autocast)

    def append(
        self, node: Any, target: str, args: Any, kwargs: Any, grad: bool, autocast: Autocast | None
    ) -> OpRef:
        module_path, source_line = _module_path(node), _source_line(node)
        where = f"op {target} in {module_path or 'the module'} at {source_line or 'an unknown line'}"
        value = node.meta.get("val")
        draft = OpNode(
            name=self.unique(node.name),
            kind=Kind.NON_PARAMETRIC,
            target=target,
            args=tuple(_argument(arg, where) for arg in args),
            kwargs=tuple((name, _argument(value, where)) for name, value in kwargs.items()),
            outputs=(),
            grad_enabled=grad,
            autocast=autocast,
            module_path=module_path,
            source_line=source_line,
        )
        several = isinstance(value, tuple | list)
        tensors = value if several else (value,)
        if any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool | int | float) for v in tensors):
            raise CaptureError(
                f"{where} reads a number out of a tensor, so what follows depends on the data; keep it a "
                "tensor (torch.where instead of if, a mask instead of indexing)"
            )
        outputs = tuple(meta_of(v, where) for v in tensors if isinstance(v, Tensor))
        self.nodes.append(replace(draft, outputs=outputs, is_tuple=several))
        return OpRef(len(self.nodes) - 1)

    def unique(self, name: str) -> str:
        wanted, count = name, 1
        while wanted in self.names:
            count += 1
            wanted = f"{name}__{count}"
        self.names.add(wanted)
        return wanted


def target_name(target: Any) -> str:
    """ "aten.linear.default", "builtin.getitem", "higher_order.cond"."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.__name__}"
    return f"builtin.{getattr(target, '__name__', str(target))}"


def _argument(value: Any, where: str) -> Arg:
    """An op's argument as a reference or literal; CaptureError for anything else."""
    if isinstance(value, OpRef | LeafRef | bool | int | float | str) or value is None:
        return value
    if isinstance(value, tuple | list):
        return tuple(_argument(item, where) for item in value)
    for kind, type_ in (
        ("dtype", torch.dtype),
        ("layout", torch.layout),
        ("memory_format", torch.memory_format),
    ):
        if isinstance(value, type_):
            return TorchLiteral(kind, str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return TorchLiteral("device", "")
    raise CaptureError(f"{where}: an argument of type {type(value).__name__} cannot travel to a worker")


def _module_path(node: Any) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path == ROOT else path.removeprefix(f"{ROOT}.")


def _source_line(node: Any) -> str:
    """ "file.py:41": the innermost line outside torch itself."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not _NOT_THE_OWNERS.search(frame[0])] or frames
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
