"""torch.export without its side noise, for models and for the formulas of strategies."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run parts under ``torch.compile`` as they are written: workers run ops, and compiling them for one call
    takes a minute and a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Return the program of a module, run on these inputs. Raise whatever the module raises.

    Where export fails torch prints its half-made graph: suppressed, as the caller's error names the line or
    the method instead. What it warns of (attributes assigned in forward) the callers' proofs decide.
    """
    log = logging.getLogger("torch.fx.experimental")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            return torch.export.export(module, inputs, strict=False)
    finally:
        log.setLevel(before)
