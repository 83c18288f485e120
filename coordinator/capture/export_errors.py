"""Turns what a module raised under torch.export into a refusal that names where, why and the way out."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from atoll.errors import CaptureError
from coordinator.capture.unseen import Unfollowed, is_own_frame, is_pythons

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

# Frames in these folders are not the user's, whose own may bear the same names.
_OURS = Path(__file__).resolve().parents[1]
_NOT_THEIRS = (str(Path(torch.__file__).parent), str(_OURS), str(_OURS.parent / "atoll") + os.sep)
_DATA_DEPENDENT = re.compile(r"GuardOnDataDependent|DataDependent|DynamicOutputShape|PendingUnbacked")
_TEXT = re.compile(r"data-dependent|unbacked|meta tensors|fake tensor|FakeTensor\.__format__", re.IGNORECASE)
# Switches that well-known libraries have for what cannot be captured, by words of the refusal.
_REMEDIES = (
    (
        re.compile(r"data-dependent.*\bexpert"),
        "models of transformers compute their experts in fixed shapes with "
        'experts_implementation="grouped_mm", their default, in the config',
    ),
    (
        re.compile(r"flex_attention"),
        'models of transformers attend by torch\'s own op with attn_implementation="sdpa" in the config',
    ),
    (
        re.compile(r"\.numpy\(\) is not supported"),
        "the model passes a tensor to numpy, which the graph cannot hold; compute in tensor ops",
    ),
    (
        re.compile(r"FakeTensor\.__format__|\bprint\("),
        "leave out what prints or logs numbers: the job's losses and metrics are in atoll watch",
    ),
    (
        re.compile(
            r"higher_order\.(cond|while_loop|map|scan|associative_scan)|(Cond|WhileLoop|Map|Scan)Autograd"
        ),
        "compute both branches and choose by torch.where; write a loop in Python, of a fixed number of turns",
    ),
    (
        re.compile(r"_vmap_|_batch_dim"),
        "torch.vmap is not followed; call the function on the whole batch, with the dimension written out",
    ),
    (
        re.compile(r"gaussian_nll_loss|GaussianNLLLoss"),
        "torch's loss looks at its variances; write 0.5 * (var.log() + (out - target).square() / var).mean()",
    ),
    (
        re.compile(r"\.generator\b"),
        "draws are repeated from the job's seed: draw without generator= (torch.rand(...))",
    ),
    (
        re.compile(r"embedding_renorm_"),
        "leave max_norm out of nn.Embedding, which rewrites its weight in forward, and bound what it gives "
        "(F.normalize)",
    ),
    (
        re.compile(r"ctc_loss"),
        "torch.export cannot follow ctc_loss, whose work depends on its lengths; take a loss of fixed shapes",
    ),
    (
        re.compile(r"data-dependent.*\bone_hot\("),
        "give F.one_hot the number of classes, num_classes=..., which it else reads from the labels",
    ),
    (
        re.compile(r"data-dependent.*\blstsq\("),
        "write lstsq(a, b) as torch.linalg.solve(a.mT @ a, a.mT @ b)",
    ),
    (
        re.compile(r"data-dependent.*\b(cov|corrcoef)\("),
        "write the covariance as c @ c.T / (n - 1), with c = x - x.mean(1, keepdim=True)",
    ),
    (
        re.compile(r"classes\.quantized|fake_quantize_"),
        "quantised layers are not trained; give the module as it was before, and quantise what is exported",
    ),
    (
        re.compile(r"aten\.as_strided"),
        "windows and steps of a tensor are x.unfold(...), slices and .view(...)",
    ),
    (
        re.compile(r"_standard_gamma"),
        "draw from torch.distributions.LogNormal in place of Gamma and what is made of it",
    ),
    (
        re.compile(r"argument 'size' failed to unpack.*FakeTensor|_pack_padded_sequence"),
        "torch.export cannot follow packed sequences, whose work depends on their lengths; run the layer "
        "over the padded batch and take each row's last output, out[torch.arange(len(out)), lengths - 1]",
    ),
)


def remedies(refusal: str) -> tuple[str, ...]:
    """The switches known to help against a refusal of these words."""
    return tuple(words for pattern, words in _REMEDIES if pattern.search(refusal))


def blame(error: BaseException, module: nn.Module) -> CaptureError:
    """A CaptureError naming the module path, the source line and its text."""
    names = {id(child): name for name, child in module.named_modules()}
    path, line, statement = "", "", ""
    for frame, number in _frames(error):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            path = names[id(owner)] or path
        filename = frame.f_code.co_filename
        known = is_own_frame(frame) if filename.startswith("<") else not filename.startswith(_NOT_THEIRS)
        if known and not is_pythons(filename):
            line = f"{Path(filename).name}:{number}"
            statement = linecache.getline(filename, number).strip()[:120]
    where = f"in {path or 'the module'} at {line or 'an unknown line'}" + (
        f" (`{statement}`)" if statement else ""
    )
    causes = list(_chain(error))
    for cause in causes:
        if isinstance(cause, Unfollowed):
            return CaptureError(f"the model {cause}: {where}")
    text = " ".join(str(error).split())[:240]
    if any(_DATA_DEPENDENT.search(type(cause).__name__) or _TEXT.search(str(cause)) for cause in causes):
        refusal = (
            f"data-dependent control flow or shape {where}: an op there reads a number out of a tensor; "
            "keep it a tensor (torch.where instead of if, a mask instead of indexing)"
        )
    else:
        refusal = f"the module cannot be captured {where}: {type(error).__name__}: {text}"
    return CaptureError("; ".join((refusal, *remedies(refusal))))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Frames of the deepest cause that has any of the user's, outermost first."""
    found: list[tuple[FrameType, int]] = []
    for cause in _chain(error):
        frames = []
        trace = cause.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        if len(frames) > len(found):
            found = frames
    return found
