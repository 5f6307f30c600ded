"""The configuration: one frozen, strict class per table of the TOML file.

Keys are those of torchtitan of January 2025 and our own. The text under each field is its help on the command
line and in docs/configuration.md. What a single value may be is in its type; what several values must be
together is in `trainer.config.rules`.
"""

from pydantic import Field

from trainer.config.tables.base import Table
from trainer.config.tables.layout import ActivationCheckpoint, Experimental, Float8
from trainer.config.tables.learning import Data, LRScheduler, Model, Optimizer, Training, Validation
from trainer.config.tables.run import Checkpoint, Comm, Job, Metrics, Profiling

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Config",
    "Data",
    "Experimental",
    "Float8",
    "Job",
    "LRScheduler",
    "Metrics",
    "Model",
    "Optimizer",
    "Profiling",
    "Table",
    "Training",
    "Validation",
]


class Config(Table):
    """Everything that decides a run, apart from the number of processes."""

    job: Job = Field(default_factory=Job)
    profiling: Profiling = Field(default_factory=Profiling)
    metrics: Metrics = Field(default_factory=Metrics)
    model: Model = Field(default_factory=Model)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    training: Training = Field(default_factory=Training)
    experimental: Experimental = Field(default_factory=Experimental)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    float8: Float8 = Field(default_factory=Float8)
    comm: Comm = Field(default_factory=Comm)
    validation: Validation = Field(default_factory=Validation)
    data: Data = Field(default_factory=Data)
