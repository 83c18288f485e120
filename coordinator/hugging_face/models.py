"""Models of folders, as transformers and peft load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import transformers

from atoll.errors import UsageError

ADAPTER = "adapter_config.json"


def loaded(model: Any) -> Any:
    """Return a model as it is, or that of a folder: the class that its configuration names, or an adapter on
    its base, which goes on to be trained. UsageError for a folder that names neither."""
    if not isinstance(model, str | Path):
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UsageError(f"model = {str(model)!r} is not a folder; give one, or the model itself")
    if (folder / ADAPTER).is_file():
        base = peft.PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        return peft.PeftModel.from_pretrained(loaded(base), str(folder), is_trainable=True)
    names = transformers.AutoConfig.from_pretrained(folder).architectures or ["a model"]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise UsageError(
            f"{folder} holds {names[0]}, which transformers do not have; load it and give the model itself"
        )
    return kind.from_pretrained(folder)
