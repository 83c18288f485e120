"""The strategies of docs/own-strategies.md, from its own blocks of code, and one that stands nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from strategies.own import OwnStrategy, own_strategy
from strategies.own.base import Values

PAGE = Path(__file__).resolve().parents[3] / "docs/own-strategies.md"


@cache
def blocks() -> tuple[str, ...]:
    """The page's blocks of Python, in order."""
    return tuple(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


@cache
def tutorial() -> ModuleType:
    """The page as a module: every block, in order, as a reader would type them into one file."""
    module = ModuleType("tutorial_of_own_strategies")
    for block in blocks():
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), vars(module))  # noqa: S102 - this project's own page
    return module


@own_strategy
class ClientMomentum(OwnStrategy):
    """Every local step leans towards where the last round went (FedCM, Xu 2021)."""

    name = "client_momentum"
    SERVER = SENT_DOWN = ("m",)

    alpha: float = 0.5
    reach: float = 0.4  # of a round: its steps times their rate

    def gradient(self, at: Values) -> Any:
        return self.alpha * at.gradient + (1 - self.alpha) * at.m

    def step(self, at: Values) -> Mapping[str, Any]:
        return {"weight": at.weight + at.mean, "m": -at.mean / self.reach}
