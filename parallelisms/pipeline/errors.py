"""What can be wrong with a pipeline schedule. Every class is a `ScheduleError`, whose text is for the user."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule, its setting, or its split cannot be used; the text says what is wrong and what would be right."""


class UnknownScheduleError(ScheduleError):
    """No schedule has this name."""


class IllegalSettingError(ScheduleError):
    """The schedule does not exist for these ranks, stages or microbatches."""


class MemoryCapError(ScheduleError):
    """The schedule holds more activations than the configured limit."""


class SplitError(ScheduleError):
    """The modules cannot be divided into stages as asked."""


class CsvError(ScheduleError):
    """A schedule file cannot be read or written."""


class VerificationError(ScheduleError):
    """Action lists are not a correct training step."""


class UnknownActionError(VerificationError):
    """An action names a stage or microbatch that does not exist, or stands on the wrong rank."""


class MissingActionError(VerificationError):
    """An action that the step needs is not in the lists."""


class RepeatedActionError(VerificationError):
    """The same work is done twice."""


class OrderError(VerificationError):
    """A rank's list has an action before one that it depends on in the same list."""


class ChannelError(VerificationError):
    """The two sides of a channel do not post the same messages in the same order."""


class DeadlockError(VerificationError):
    """The ranks wait for each other for ever; the text names the cycle."""


class ShardingError(VerificationError):
    """Parameters are used while sharded, never released, or gradients are not reduced once at the end."""
