"""Which op is of which family: what it makes of the samples in its arguments.

An op that is in none makes RAW of them. A family takes a ``Call`` and gives the result's Value, or one for
each of a tuple's.
"""

from __future__ import annotations

from atoll.flow import matmul
from atoll.flow.call import Call, Family, Result
from atoll.flow.elementwise import (
    arange,
    bernoulli,
    created,
    drawn,
    dropout,
    elementwise,
    eye,
    like,
    normal,
    overwritten,
    random_,
    same,
)
from atoll.flow.indexing import (
    embedding,
    gather,
    index,
    index_add,
    index_select,
    one_hot,
    scatter,
    written_slice,
)
from atoll.flow.layers import attention, each_sample, normalised, recurrent, spatial, trailing, window
from atoll.flow.losses import each_row, loss_of_each, similarity
from atoll.flow.reductions import along, differences, norm, padded, reduced, reduction, softmax
from atoll.flow.value import Shape, Value, blend, broken, raw
from atoll.flow.views import (
    broadcast,
    broadcast_all,
    cat,
    movedim,
    permute,
    repeat,
    reshape,
    select,
    slice_,
    split,
    stack,
    transpose,
    unbind,
)


def _table(*families: tuple[Family, str]) -> dict[str, Family]:
    return {name: family for family, names in families for name in names.split()}


FAMILIES: dict[str, Family] = _table(
    (
        elementwise,
        """
        abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh arccos arccosh arcsin
        arcsinh arctan arctan2 arctanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor and or xor lshift rshift ceil clamp clamp_max clamp_min clip copysign
        cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix float_power floor
        floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0 isclose isfinite isinf
        isnan isneginf isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2
        logical_and logical_not logical_or logical_xor logit lt maximum minimum mul multiply nan_to_num ne neg
        negative not_equal positive pow rad2deg reciprocal remainder round rsqrt rsub sgn sigmoid sign signbit
        sin sinc sinh sqrt square sub subtract tan true_divide trunc where xlogy masked_fill
        special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
        special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e
        special_log1p special_log_ndtr special_logit special_ndtr special_ndtri special_psi special_round
        special_sinc special_xlog1py special_xlogy celu elu gelu hardshrink hardsigmoid hardswish hardtanh
        leaky_relu log_sigmoid mish relu relu6 selu silu softplus softshrink tanh threshold
        """,
    ),
    (same, "alias clone contiguous detach lift_fresh lift_fresh_copy to _to_copy resolve_conj resolve_neg"),
    (broadcast_all, "broadcast_tensors"),
    (broadcast, "expand expand_as broadcast_to type_as"),
    (overwritten, "copy fill"),
    (like, "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full zero"),
    (created, "zeros ones full empty scalar_tensor"),
    (eye, "eye"),
    (arange, "arange"),
    (bernoulli, "bernoulli"),
    (normal, "normal"),
    (
        drawn,
        """
        rand randn randint rand_like randn_like randint_like uniform exponential geometric log_normal cauchy
        """,
    ),
    (random_, "poisson rrelu"),
    (dropout, "dropout alpha_dropout native_dropout feature_dropout feature_alpha_dropout"),
    (differences, "diff"),
    (softmax, "softmax log_softmax softmax _log_softmax special_softmax special_log_softmax _safe_softmax"),
    (along(), "cumsum cumprod cummax cummin logcumsumexp sort argsort topk kthvalue"),
    (along("dims"), "flip"),
    (along(reach=2), "tril triu"),
    (
        padded,
        """
        pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
        replication_pad2d replication_pad3d
        """,
    ),
    (reduction(alike=True), "sum mean nansum nanmean var std var_mean std_mean count_nonzero"),
    (reduction(alike=False), "amax amin all any prod logsumexp special_logsumexp"),
    (reduction(alike=False, picks=True), "max min argmax argmin median nanmedian mode"),
    (norm, "linalg_vector_norm norm"),
    (
        trailing(spatial),
        """
        conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d upsample_bicubic2d
        upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_trilinear3d
        """,
    ),
    (
        trailing(window),
        """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d
        max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
        max_pool3d_with_indices
        """,
    ),
    (trailing(lambda call: 3), "pixel_shuffle pixel_unshuffle"),
    (trailing(normalised), "layer_norm native_layer_norm rms_norm"),
    (trailing(each_sample), "group_norm native_group_norm prelu glu channel_shuffle"),
    (attention, "scaled_dot_product_attention"),
    (recurrent, "lstm gru rnn_tanh rnn_relu"),
    (embedding, "embedding"),
    (index, "index"),
    (index_select, "index_select"),
    (gather, "gather take_along_dim"),
    (scatter, "scatter scatter_add scatter_reduce"),
    (index_add, "index_add"),
    (one_hot, "one_hot"),
    (written_slice(removed=False), "slice_scatter"),
    (written_slice(removed=True), "select_scatter"),
    (reshape, "view reshape _unsafe_view flatten unflatten ravel squeeze unsqueeze view_as reshape_as"),
    (transpose, "transpose t numpy_T mT adjoint swapaxes swapdims"),
    (permute, "permute"),
    (movedim, "movedim moveaxis"),
    (slice_, "slice"),
    (select, "select"),
    (split, "split split_with_sizes chunk unsafe_chunk unsafe_split unsafe_split_with_sizes"),
    (unbind, "unbind"),
    (cat, "cat concat concatenate"),
    (stack, "stack"),
    (repeat, "repeat tile"),
    (matmul.contraction, "mm bmm matmul linear mv dot addmm baddbmm einsum"),
    (similarity, "cosine_similarity"),
    (
        loss_of_each(elementwise),
        """
        binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss
        mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
        """,
    ),
    (loss_of_each(each_row), "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd multi_margin_loss"),
)


def transferred(call: Call) -> Result:
    """Return the result of ``call``. ValueError, IndexError, KeyError or TypeError for arguments no honest
    call has."""
    family = FAMILIES.get(call.name)
    if family is not None:
        return family(call)
    unknown = tuple(_unknown(call, shape) for shape in call.shapes)
    return unknown if len(unknown) > 1 else unknown[0]


def _unknown(call: Call, shape: Shape) -> Value:
    return (
        broken(call.values, shape)
        or blend(call.values, shape)
        or raw(shape, "what it does with samples is not known")
    )


__all__ = ["FAMILIES", "reduced", "transferred"]
