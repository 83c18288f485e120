"""Hugging Face's models and data, trained on workers: the extra ``atoll[hf]``.

    from atoll.hf import Trainer        # in place of: from transformers import Trainer
    from atoll.hf import job            # for a job file: return job("my-model", dataset, arguments)

A door, for users alone: what is behind it stands on the coordinator's client, and nothing of Atoll's own
imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.errors import UsageError

if TYPE_CHECKING:
    from coordinator.hugging_face.trainer import Trainer, job

__all__ = ["Trainer", "job"]

EXTRA = ("accelerate", "datasets", "networkx", "peft", "transformers")
"""Packages of the extra."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from coordinator.hugging_face import trainer  # slow to import, and of an extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise UsageError(f"atoll.hf needs {error.name}; pip install 'atoll[hf]'") from None
    return getattr(trainer, name)
