"""Attention of a process's own queries to the keys of all, which go round a block at a time.

Each process begins with its own block of keys and values. While it attends to the block that it has, that is
already on its way to the next process. Results of blocks are joined by their logsumexps l = log sum exp(s):

    l = log(exp l_1 + exp l_2),  out = exp(l_1 - l) out_1 + exp(l_2 - l) out_2

In the backward the blocks go round again. Behind each follow the sums of its gradients, which end where the
block is at home. No process ever has more than two blocks, however long a row is.

Kernels are those that torch's own attention calls, of which these alone return logsumexps. Dims: B rows, H
heads, G heads of keys, Q own queries, K keys of a block, E features.
Source: Ring Attention (Liu 2023), section 3; FlashAttention-2 (Dao 2023), section 3.1, for the joining.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from atoll.errors import UnsupportedOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.mesh.group import Group

    Joint = tuple[Tensor, Tensor]  # out [B, H, Q, E], logsumexp [B, H, Q]
    Block = tuple[Tensor, Tensor, Tensor]  # queries, keys, values, or their gradients
    Forward = Callable[[Tensor, Tensor, Tensor, bool, float], Joint]
    Backward = Callable[[Tensor, Block, Joint, bool, float], Block]

ALIGNED, LOGSUMEXPS = 8, 32  # CUDA's kernel takes multiples of so many features of a head, and of these
_ATEN = torch.ops.aten


def ring_attention(
    query_BHQE: Tensor,
    key_BGKE: Tensor,
    value_BGKE: Tensor,
    group: Group,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return [B, H, Q, E] softmax(scale q k^T) v of this process's queries over the keys of all processes.

    ``causal``: over those up to each query's own place, of Q = K tokens a process in order of the ranks.
    ``scale``: E**-0.5 where it is None. H is a multiple of G. UnsupportedOp on a device without a kernel.
    """
    device = query_BHQE.device.type
    if device not in KERNELS:
        raise UnsupportedOp(f"ring attention has no kernel on {device}: cpu and cuda have")
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_BHQE.dtype
    given = [each.to(dtype) for each in (query_BHQE, key_BGKE, value_BGKE)]
    given = [each if each.stride(-1) == 1 else each.contiguous() for each in given]
    scale = query_BHQE.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(*given, causal, scale, group)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, group: Group
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        forward, _ = KERNELS[query.device.type]
        held, joint = _packed(key, value), cast("Joint | None", None)
        for hop in range(group.size):
            coming = group.pass_on(held) if hop < group.size - 1 else None
            if not causal or hop <= group.rank:
                keys, values = (_repeated(part, query) for part in _unpacked(held))
                found = forward(query, keys, values, causal and hop == 0, scale)
                joint = found if joint is None else _joined(joint, found)
            if coming is not None:
                held = coming()
        assert joint is not None  # noqa: S101 - each sees its own block
        out, logsumexp = joint[0].to(query.dtype), joint[1]
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.causal, ctx.scale, ctx.group = causal, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return (None,) * 6
        query, key, value, out, logsumexp = ctx.saved_tensors
        group, wanted = ctx.group, any(ctx.needs_input_grad[1:3])
        grad_out, grad_query = grads[0].contiguous(), torch.zeros_like(query, dtype=logsumexp.dtype)
        held, own = _packed(key, value), None
        arriving: Callable[[], Tensor] | None = None
        for hop in range(group.size):
            coming = group.pass_on(held) if hop < group.size - 1 else None
            sums = None
            if not ctx.causal or hop <= group.rank:
                found = _block_gradients(ctx, grad_out, (query, *_unpacked(held)), (out, logsumexp), hop)
                grad_query += found[0]
                sums = _packed(*found[1:]) if wanted else None
            if wanted and hop == 0:
                own = sums
            elif wanted:
                arriving = group.pass_on(_added(sums, None if arriving is None else arriving(), held))
            if coming is not None:
                held = coming()
        gradient = grad_query.to(query.dtype)
        if not wanted or own is None:
            return gradient, None, None, None, None, None
        if arriving is not None:
            own += arriving()
        return (gradient, *_unpacked(own), None, None, None)


def _block_gradients(ctx: Any, grad_out: Tensor, given: Block, joint: Joint, hop: int) -> Block:
    """Gradients of the queries, and of one block's keys and values."""
    query, key, value = given
    _, backward = KERNELS[query.device.type]
    block = (query, _repeated(key, query), _repeated(value, query))
    found, *rest = backward(grad_out, block, joint, ctx.causal and hop == 0, ctx.scale)
    of_key, of_value = (each.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2) for each in rest)
    return found, of_key, of_value


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """A block's keys and values one behind the other, as they travel."""
    return torch.stack((key, value))


def _unpacked(block: Tensor) -> tuple[Tensor, Tensor]:
    key, value = block.unbind(0)
    return key, value


def _repeated(part: Tensor, query: Tensor) -> Tensor:
    """Heads of keys or values as often as queries share them."""
    times = query.shape[1] // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, 1)


def _added(sums: Tensor | None, before: Tensor | None, like: Tensor) -> Tensor:
    """The sum of what is there; zeros where nothing is."""
    if sums is None:
        return torch.zeros_like(like) if before is None else before
    return sums if before is None else sums.add_(before)


def _joined(one: Joint, other: Joint) -> Joint:
    """Attention to the keys of both."""
    logsumexp = torch.logaddexp(one[1], other[1])
    weights = [(each[1] - logsumexp).exp().unsqueeze(-1) for each in (one, other)]
    return one[0] * weights[0] + other[0] * weights[1], logsumexp


# ---------------------------------------------------------------- kernels


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Joint:
    found: Joint = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return found


def _cpu_backward(grad_out: Tensor, block: Block, joint: Joint, causal: bool, scale: float) -> Block:
    found: Block = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *block, *joint, 0.0, causal, scale=scale
    )
    return found


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Joint:
    block = [_filled(each) for each in (query, key, value)]
    out, logsumexp, *_ = _ATEN._scaled_dot_product_efficient_attention(
        *block, None, True, 0.0, causal, scale=scale
    )
    return out[..., : query.shape[-1]], logsumexp[..., : query.shape[-2]]


def _cuda_backward(grad_out: Tensor, block: Block, joint: Joint, causal: bool, scale: float) -> Block:
    features, queries = grad_out.shape[-1], grad_out.shape[-2]
    out, logsumexp = _filled(joint[0]), functional.pad(joint[1], (0, -queries % LOGSUMEXPS))
    seed = torch.zeros((), dtype=torch.int64, device=grad_out.device)  # of a dropout that there is not
    found = _ATEN._scaled_dot_product_efficient_attention_backward(
        _filled(grad_out), *map(_filled, block), None, out, logsumexp, seed, seed, 0.0,
        (True, True, True, False), causal, scale=scale,
    )  # fmt: skip
    of_query, of_key, of_value = (each[..., :features] for each in found[:3])
    return of_query, of_key, of_value


def _filled(value: Tensor) -> Tensor:
    """The tensor with features of nothing up to what the kernel takes at once."""
    missing = -value.shape[-1] % ALIGNED
    return functional.pad(value, (0, missing)) if missing else value


KERNELS: dict[str, tuple[Forward, Backward]] = {
    "cpu": (_cpu_forward, _cpu_backward),
    "cuda": (_cuda_forward, _cuda_backward),
}
"""By the type of a device: attention to a block, and its gradients from the results over all blocks."""
