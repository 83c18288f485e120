"""Atoll: train one model across islands of GPUs. The vocabulary that both sides share.

>>> from atoll import Job, TrainingSpec, ByteText
"""

from atoll.data import ByteText, Rows
from atoll.federated import Federated, Registered
from atoll.job import (
    Job,
    Optimizer,
    OptimizerName,
    ParamGroup,
    Precision,
    Recompute,
    Schedule,
    ScheduleKind,
    TrainingSpec,
)

__version__ = "0.7.0"

__all__ = [
    "ByteText",
    "Federated",
    "Job",
    "Optimizer",
    "OptimizerName",
    "ParamGroup",
    "Precision",
    "Recompute",
    "Registered",
    "Rows",
    "Schedule",
    "ScheduleKind",
    "TrainingSpec",
    "__version__",
]
