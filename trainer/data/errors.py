"""The errors of the data: nothing left to read, and a source that stays away."""

from trainer.errors import ExitCode, StagelineError


class DataExhausted(StagelineError):
    """The configured number of epochs is over; every rank raises it before the same optimizer step."""


class SourceFailed(StagelineError):
    """A source that was read before no longer answers, after a bounded number of attempts."""

    exit_code = ExitCode.RANK_FAILED
