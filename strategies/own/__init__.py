"""Strategies that this package does not contain: written by a model's owner, installed, or sent as formulas.

Pure; torch is loaded where formulas are captured or computed. Imports strategies and atoll alone.
"""

from __future__ import annotations

from strategies.own.base import OwnStrategy, own_strategy

__all__ = ["OwnStrategy", "own_strategy"]
