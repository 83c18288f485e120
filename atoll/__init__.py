"""Atoll: train one model across islands of GPUs. The vocabulary that both sides share.

>>> from atoll import Job, TrainingSpec, ByteText
>>> fleet = atoll.connect()
"""

from atoll.data import ByteText, Rows
from atoll.federated import Federated, Registered
from atoll.fleet import connect
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
from atoll.version import __version__

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
    "connect",
]
