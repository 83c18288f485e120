"""The allow-list: the tensor ops that a captured model may name and a worker will run.

Only ops that compute tensors from tensors and literals are here. Left out are ops that touch
files, processes or pointers (``from_file``, ``set_``), that change a storage or a view's window
under their caller (``resize_``, ``as_strided``), whose result size depends on data (``nonzero``,
``masked_select``), and vendor-internal kernels that trust their arguments. Targets are names of
the "aten" operator set, "aten.NAME.OVERLOAD"; a bare name in the table means ".default".
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from atoll.bounded import MAX_DIMS
from atoll.errors import UnsupportedOp
from atoll.opdag import Arg, LeafRef, OpNode, OpRef, TensorMeta, TorchLiteral, arguments

GETITEM = "builtin.getitem"
GROUPED = "aten._grouped_mm.default"
MAX_DEPTH = 4  # tuples within tuples of one argument
MAX_LITERALS = 4096  # leaves of one node's arguments
MAX_TEXT = 256  # characters of a string argument
MAX_OUTPUTS = 1024  # of a tuple op

_POINTWISE = """
    abs abs_ absolute absolute_ acos acos_ acosh acosh_ add:Scalar,Tensor add_:Scalar,Tensor addcdiv
    addcdiv_ addcmul addcmul_ angle asin asin_ asinh asinh_ atan atan_ atan2 atan2_ atanh atanh_ arccos
    arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan_ arctan2 arctan2_ arctanh
    arctanh_ bitwise_and:Scalar,Scalar_Tensor,Tensor bitwise_and_:Scalar,Tensor
    bitwise_left_shift:Scalar_Tensor,Tensor,Tensor_Scalar bitwise_left_shift_:Tensor,Tensor_Scalar
    bitwise_not bitwise_not_ bitwise_or:Scalar,Scalar_Tensor,Tensor bitwise_or_:Scalar,Tensor
    bitwise_right_shift:Scalar_Tensor,Tensor,Tensor_Scalar bitwise_right_shift_:Tensor,Tensor_Scalar
    bitwise_xor:Scalar,Scalar_Tensor,Tensor bitwise_xor_:Scalar,Tensor __and__:Scalar,Tensor
    __or__:Scalar,Tensor __xor__:Scalar,Tensor __lshift__:Scalar,Tensor __rshift__:Scalar,Tensor
    __iand__:Scalar,Tensor __ior__:Scalar,Tensor __ixor__:Scalar,Tensor ceil ceil_ clamp:default,Tensor
    clamp_:default,Tensor clamp_max:default,Tensor clamp_max_:default,Tensor clamp_min:default,Tensor
    clamp_min_:default,Tensor clip:default,Tensor clip_:default,Tensor copysign:Scalar,Tensor
    copysign_:Scalar,Tensor cos cos_ cosh cosh_ deg2rad deg2rad_ digamma digamma_
    div:Scalar,Scalar_mode,Tensor,Tensor_mode div_:Scalar,Scalar_mode,Tensor,Tensor_mode
    divide:Scalar,Scalar_mode,Tensor,Tensor_mode divide_:Scalar,Scalar_mode,Tensor,Tensor_mode
    eq:Scalar,Tensor eq_:Scalar,Tensor erf erf_ erfc erfc_ erfinv erfinv_ exp exp_ exp2 exp2_ expm1
    expm1_ fix fix_ float_power:Scalar,Tensor_Scalar,Tensor_Tensor float_power_:Scalar,Tensor floor
    floor_ floor_divide:default,Scalar floor_divide_:Scalar,Tensor fmax fmin fmod:Scalar,Tensor
    fmod_:Scalar,Tensor frac frac_ frexp:Tensor ge:Scalar,Tensor ge_:Scalar,Tensor greater:Scalar,Tensor
    greater_:Scalar,Tensor greater_equal:Scalar,Tensor greater_equal_:Scalar,Tensor gt:Scalar,Tensor
    gt_:Scalar,Tensor heaviside heaviside_ hypot hypot_ i0 i0_ isclose isfinite isinf isnan isneginf
    isposinf isreal ldexp:Tensor ldexp_ le:Scalar,Tensor le_:Scalar,Tensor lerp:Scalar,Tensor
    lerp_:Scalar,Tensor less:Scalar,Tensor less_:Scalar,Tensor less_equal:Scalar,Tensor
    less_equal_:Scalar,Tensor lgamma lgamma_ log log_ log10 log10_ log1p log1p_ log2 log2_ logaddexp
    logaddexp2 logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor
    logical_xor_ logit logit_ lt:Scalar,Tensor lt_:Scalar,Tensor maximum minimum mul:Scalar,Tensor
    mul_:Scalar,Tensor multiply:Scalar,Tensor multiply_:Scalar,Tensor mvlgamma mvlgamma_ nan_to_num
    nan_to_num_ ne:Scalar,Tensor ne_:Scalar,Tensor neg neg_ negative negative_ not_equal:Scalar,Tensor
    not_equal_:Scalar,Tensor polygamma polygamma_ positive pow:Scalar,Tensor_Scalar,Tensor_Tensor
    pow_:Scalar,Tensor rad2deg rad2deg_ real imag conj conj_physical conj_physical_ resolve_conj
    resolve_neg complex polar view_as_complex view_as_real reciprocal reciprocal_
    remainder:Scalar,Scalar_Tensor,Tensor remainder_:Scalar,Tensor round:default,decimals
    round_:default,decimals rsqrt rsqrt_ rsub:Scalar,Tensor sgn sgn_ sigmoid sigmoid_ sign sign_ signbit
    sin sin_ sinc sinc_ sinh sinh_ special_digamma special_entr special_erf special_erfc special_erfcx
    special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc
    special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
    special_logit special_ndtr special_ndtri special_psi special_round special_sinc
    special_xlog1py:default,other_scalar,self_scalar special_xlogy:default,other_scalar,self_scalar
    special_zeta:default,other_scalar,self_scalar sqrt sqrt_ square square_ sub:Scalar,Tensor
    sub_:Scalar,Tensor subtract:Scalar,Tensor subtract_:Scalar,Tensor tan tan_ true_divide:Scalar,Tensor
    true_divide_:Scalar,Tensor trunc trunc_ where:default,Scalar,ScalarOther,ScalarSelf,self
    xlogy:Scalar_Other,Scalar_Self,Tensor xlogy_:Scalar_Other,Tensor
"""
_ACTIVATION = """
    celu celu_ elu elu_ gelu gelu_ glu hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh
    hardtanh_ leaky_relu leaky_relu_ log_sigmoid mish mish_ prelu relu relu_ relu6 relu6_ selu selu_
    silu silu_ softplus softshrink tanh tanh_ threshold threshold_ softmax:int _softmax log_softmax:int
    _log_softmax special_softmax special_log_softmax _safe_softmax
"""
_MATRIX = """
    addbmm addbmm_ addmm:default,dtype addmm_ addmv addmv_ addr addr_ baddbmm:default,dtype baddbmm_
    bilinear bmm:default,dtype cdist chain_matmul cross dot einsum ger inner kron linear linalg_cross
    linalg_matmul linalg_multi_dot linalg_norm:default,ord_str linalg_matrix_norm:default,str_ord
    linalg_vector_norm linalg_vecdot linalg_inv linalg_inv_ex linalg_solve linalg_solve_triangular
    linalg_cholesky linalg_det linalg_slogdet linalg_matrix_power matmul matrix_exp matrix_power
    mm:default,dtype mv outer tensordot vdot linalg_qr linalg_svd linalg_svdvals linalg_eigh
    linalg_eigvalsh linalg_pinv:atol_rtol_float,atol_rtol_tensor linalg_matrix_exp cholesky cholesky_solve
    cholesky_inverse inverse det logdet slogdet _weight_norm norm_except_dim linalg_householder_product
    _grouped_mm renorm
"""
_CONVOLUTION = """
    conv1d:default,padding conv2d:default,padding conv3d:default,padding conv_transpose1d
    conv_transpose2d:input conv_transpose3d:input convolution conv_tbc im2col col2im
"""
_NORMALISATION = """
    batch_norm group_norm instance_norm layer_norm native_group_norm native_layer_norm rms_norm
    cosine_similarity norm:Scalar,ScalarOpt_dim,ScalarOpt_dim_dtype,ScalarOpt_dtype dist
    pairwise_distance
"""
_POOLING_AND_RESAMPLING = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d
    avg_pool2d avg_pool3d max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices
    max_pool3d max_pool3d_with_indices upsample_bicubic2d:default,vec upsample_bilinear2d:default,vec
    upsample_linear1d:default,vec upsample_nearest1d:default,vec upsample_nearest2d:default,vec
    upsample_nearest3d:default,vec upsample_trilinear3d:default,vec
    _upsample_nearest_exact1d:default,vec _upsample_nearest_exact2d:default,vec
    _upsample_nearest_exact3d:default,vec _upsample_bicubic2d_aa:default,vec
    _upsample_bilinear2d_aa:default,vec grid_sampler grid_sampler_2d grid_sampler_3d
    affine_grid_generator pixel_shuffle pixel_unshuffle channel_shuffle
"""
_ATTENTION_AND_RECURRENCE = """
    scaled_dot_product_attention lstm:data,input gru:data,input rnn_relu:data,input rnn_tanh:data,input
    lstm_cell gru_cell rnn_relu_cell rnn_tanh_cell
"""
_REDUCTION = """
    all:default,dim,dims amax amin aminmax any:default,dim,dims argmax argmin argsort:default,stable
    corrcoef count_nonzero:default,dim_IntList cov cummax cummin cumprod cumprod_ cumsum cumsum_
    cumulative_trapezoid:dx,x diff kthvalue logcumsumexp logsumexp special_logsumexp
    max:default,dim,other mean:default,dim median:default,dim min:default,dim,other mode msort nanmean
    nanmedian:default,dim nanquantile:default,scalar nansum prod:default,dim_int quantile:default,scalar
    sort:default,stable std:default,correction,dim std_mean:default,correction,dim
    sum:default,dim_IntList sum_to_size topk trace trapezoid:dx,x trapz:dx,x var:default,correction,dim
    var_mean:default,correction,dim searchsorted:Scalar,Tensor bucketize:Scalar,Tensor histc
"""
_LOSS = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
    ctc_loss:IntList,Tensor hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
    multi_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss
"""
_INDEXING = """
    embedding embedding_bag:default,padding_idx gather index:Tensor index_add index_add_ index_copy
    index_copy_ index_fill:int_Scalar,int_Tensor index_fill_:int_Scalar,int_Tensor index_put index_put_
    index_reduce index_reduce_ index_select masked_fill:Scalar,Tensor masked_fill_:Scalar,Tensor
    masked_scatter masked_scatter_ one_hot scatter:reduce,src,value,value_reduce
    scatter_:reduce,src,value,value_reduce scatter_add scatter_add_ scatter_reduce:two
    scatter_reduce_:two select_scatter slice_scatter diagonal_scatter take take_along_dim
    isin:Scalar_Tensor,Tensor_Scalar,Tensor_Tensor tril tril_ triu triu_ tril_indices triu_indices
    fill_diagonal_
"""
_SHAPE = """
    adjoint alias atleast_1d:default,Sequence atleast_2d:default,Sequence atleast_3d:default,Sequence
    block_diag broadcast_tensors broadcast_to cartesian_prod cat chunk clone column_stack combinations
    concat concatenate constant_pad_nd contiguous copy copy_ detach detach_ diag diag_embed diagonal
    diagflat dsplit:array,int dstack expand expand_as flatten:using_ints flip fliplr flipud
    hsplit:array,int hstack lift_fresh lift_fresh_copy linalg_diagonal mH mT matrix_H
    meshgrid:default,indexing movedim:int,intlist moveaxis:int,intlist narrow:default,Tensor numpy_T pad
    permute ravel reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave:Tensor,self_Tensor,self_int replication_pad1d replication_pad2d replication_pad3d
    reshape reshape_as roll rot90 row_stack select:int slice:Tensor split:default,Tensor,sizes
    split_with_sizes squeeze:default,dim,dims stack swapaxes swapdims t
    tensor_split:indices,sections,tensor_indices_or_sections tile to:device,dtype,other,dtype_layout
    _to_copy transpose:int type_as unbind:int unflatten:int unfold unsafe_chunk unsafe_split:Tensor
    unsafe_split_with_sizes unsqueeze _unsafe_view view:default,dtype view_as vsplit:array,int vstack
    vander
"""
_CREATION = """
    arange:default,start,start_step empty:memory_format empty_like eye:default,m fill:Scalar,Tensor
    fill_:Scalar,Tensor full full_like linspace:default,Scalar_Tensor,Tensor_Scalar,Tensor_Tensor
    logspace:default,Scalar_Tensor,Tensor_Scalar,Tensor_Tensor new_empty new_full new_ones new_zeros
    ones ones_like scalar_tensor zeros zeros_like bartlett_window:default,periodic
    blackman_window:default,periodic hann_window:default,periodic
    hamming_window:default,periodic,periodic_alpha,periodic_alpha_beta
    kaiser_window:default,beta,periodic zero_
"""
_SPECTRAL = """
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft
    fft_irfft2 fft_irfftn fft_hfft fft_ihfft fft_rfft fft_rfft2 fft_rfftn fft_fftfreq fft_rfftfreq
    stft:default,center istft
"""
_RANDOM = """
    alpha_dropout alpha_dropout_ bernoulli:default,Tensor,p bernoulli_:Tensor,float dropout dropout_
    exponential exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout
    feature_dropout_ multinomial native_dropout
    normal:Tensor_Tensor,Tensor_float,float_Tensor,float_float normal_ poisson rand rand_like
    randint:default,low randint_like:default,Tensor,low_dtype randn randn_like randperm rrelu rrelu_
    uniform uniform_ geometric geometric_ log_normal log_normal_ cauchy cauchy_
"""


def _expand(table: str) -> frozenset[str]:
    """ "add:Scalar,Tensor relu" -> the three full targets."""
    found: set[str] = set()
    for item in table.split():
        name, _, overloads = item.partition(":")
        found.update(f"aten.{name}.{overload}" for overload in (overloads or "default").split(","))
    return frozenset(found)


ALLOWED: frozenset[str] = frozenset({GETITEM}).union(
    *map(
        _expand,
        (
            _POINTWISE,
            _ACTIVATION,
            _MATRIX,
            _CONVOLUTION,
            _NORMALISATION,
            _POOLING_AND_RESAMPLING,
            _ATTENTION_AND_RECURRENCE,
            _REDUCTION,
            _LOSS,
            _INDEXING,
            _SHAPE,
            _CREATION,
            _SPECTRAL,
            _RANDOM,
        ),
    )
)

POINTWISE = _expand(_POINTWISE)
"""Ops that compute each element of their result from the same element of their arguments, broadcast."""
_WEIGHTS_APART = _expand("""
    linear addmm addmv baddbmm bmm mm mv matmul einsum embedding conv1d:default,padding
    conv2d:default,padding conv3d:default,padding conv_transpose1d conv_transpose2d:input
    conv_transpose3d:input convolution
""")
LAYERS = _expand("linear addmm")
# Their backward keeps their arguments, not their result, and one pass over these gives it again.
_CHEAP_AGAIN = _expand("""
    gelu silu mish softplus hardswish layer_norm group_norm rms_norm mul:Tensor
""")
DEEPEST = 2  # of cheap results, one computed from the other: a gate and its product with another value
# Their first argument (second for new_*) is the shape they allocate: a forged literal here is the
# cheapest way to ask a volunteer for all its memory.
_SHAPE_ARGUMENT = {
    **{f"aten.{n}.default": 0 for n in ("full", "zeros", "ones", "rand", "randn")},
    "aten.empty.memory_format": 0,
    **{f"aten.new_{n}.default": 1 for n in ("empty", "full", "ones", "zeros")},
    "aten.randint.default": 1,
    "aten.randint.low": 2,
}
# Autograd takes the results of these for no views: a write through one would change, behind its back, what
# a backward kernel reads offsets from. The namesake's value is the same and its writes are seen.
_TRACKED = {
    "aten._unsafe_view.default": "aten.view.default",
    "aten.unsafe_chunk.default": "aten.chunk.default",
    "aten.unsafe_split.Tensor": "aten.split.Tensor",
    "aten.unsafe_split_with_sizes.default": "aten.split_with_sizes.default",
}
# Uninitialised memory may hold another job's data; a worker hands out zeros instead.


@lru_cache(maxsize=4096)
def overload(target: str) -> Any:
    """Torch's own op that ``target`` names, with its schema; UnsupportedOp when it is not on the list or has
    none (``builtin.getitem``)."""
    if target not in ALLOWED or target == GETITEM:
        raise UnsupportedOp(f"op {target[:120]!r} is not on the allow-list of atoll.ops; it is refused")
    import torch

    _, name, which = _TRACKED.get(target, target).split(".")
    return getattr(getattr(torch.ops.aten, name), which)


def schema(target: str) -> Any:
    """The schema of an allowed op; None of ``builtin.getitem``."""
    return None if target == GETITEM else overload(target)._schema


def weights_may_wait(node: OpNode) -> bool:
    """Return whether the op's weight gradients can be taken after that of its input at no cost, since torch
    has a kernel for each. (One pass over the input gives both for a normalisation.) Not for an op that reads
    a value twice: the order in which that value's gradients are summed would depend on it."""
    if node.target not in _WEIGHTS_APART or node.is_tuple:
        return False
    refs = [arg for arg in arguments(node) if isinstance(arg, OpRef)]
    return len(refs) == len(set(refs))


def is_layer(node: OpNode) -> bool:
    """Return whether the op is a layer whose products ``atoll.deferred`` computes itself, if its tensors are
    plain."""
    return node.target in LAYERS and not node.kwargs


def reads_rows(node: OpNode) -> bool:
    """Return whether the op reads rows of a leaf, a table, whose gradient is dense."""
    if node.target != "aten.embedding.default" or node.kwargs:
        return False
    return isinstance(node.args[0], LeafRef) and node.args[4:5] in ((), (False,))  # the last: sparse


def cheap_again(node: OpNode) -> int:
    """Return how many leading arguments must need a gradient for the op's result to be recomputed in the
    backward rather than stored, at the cost of one pass over what its own backward stores; 0: never."""
    if node.target not in _CHEAP_AGAIN or node.random:
        return 0
    return 2 if node.target.startswith("aten.mul.") else 1


def check_node(node: OpNode, max_output_bytes: int) -> None:
    """Refuse a node that no honest capture makes: what a worker checks before it runs anything.

    Raises UnsupportedOp naming the node: op not allowed, arguments too deep, too many or too
    long, more than MAX_OUTPUTS outputs, one output over ``max_output_bytes``, or a creation op
    whose literal shape is not the declared one.
    """
    if node.target not in ALLOWED:
        raise refusal(node, "it is not on the allow-list")
    if len(node.outputs) > MAX_OUTPUTS:
        raise refusal(node, f"it declares {len(node.outputs)} outputs, at most {MAX_OUTPUTS} are accepted")
    for meta in node.outputs:
        _check_meta(node, meta, max_output_bytes)
    budget = [MAX_LITERALS]
    for arg in (*node.args, *(value for _, value in node.kwargs)):
        _check_arg(node, arg, 0, budget)
    _check_shape_literal(node)


def _check_meta(node: OpNode, meta: TensorMeta, max_output_bytes: int) -> None:
    if len(meta.shape) > MAX_DIMS or any(size < 0 for size in meta.shape):
        raise refusal(node, f"it declares the shape {meta.shape}")
    if meta.nbytes > max_output_bytes:
        raise refusal(node, f"an output of {meta.nbytes} bytes exceeds the limit of {max_output_bytes}")


def _check_arg(node: OpNode, arg: Arg, depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise refusal(node, f"its arguments exceed {MAX_LITERALS} items or depth {MAX_DEPTH}")
    if isinstance(arg, tuple):
        for item in arg:
            _check_arg(node, item, depth + 1, budget)
    elif isinstance(arg, str):
        if len(arg) > MAX_TEXT:
            raise refusal(node, f"a string argument has {len(arg)} characters, at most {MAX_TEXT}")
    elif isinstance(arg, int):
        if not -(2**63) <= arg < 2**63:
            raise refusal(node, f"the integer {arg} does not fit 64 bits")
    elif not (arg is None or isinstance(arg, float | OpRef | LeafRef | TorchLiteral)):
        raise refusal(node, f"an argument is a {type(arg).__name__}")


def _check_shape_literal(node: OpNode) -> None:
    at = _SHAPE_ARGUMENT.get(node.target)
    if at is None:
        return
    shape = node.args[at] if at < len(node.args) else dict(node.kwargs).get("size", ())
    sizes = shape if isinstance(shape, tuple) else (shape,)
    wanted = prod(size for size in sizes if isinstance(size, int))
    if len(node.outputs) != 1 or wanted != node.outputs[0].elements:
        raise refusal(node, f"it asks for {wanted} elements but declares {node.outputs}")


def refusal(node: OpNode, why: str) -> UnsupportedOp:
    """The error that names the node, where it stands in the model, and why it is not run."""
    where = f" in {node.module_path[:200]}" if node.module_path else ""
    line = f" at {node.source_line[:200]}" if node.source_line else ""
    return UnsupportedOp(f"op {node.target[:120]!r} ({node.name[:80]}){where}{line}: {why}; it is refused")
