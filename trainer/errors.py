"""The errors that end a job, each with the exit code that the launcher and schedulers see."""

from enum import IntEnum

from trainer.secrets import redact


class ExitCode(IntEnum):
    """What a process of Stageline returns to its shell."""

    DONE = 0
    OTHER = 1
    WRONG_CONFIGURATION = 2
    STOPPED_ON_REQUEST = 3
    RANK_FAILED = 4
    TRAINING_FAILED = 5


class StagelineError(Exception):
    """An error with a message for the user; printed without a traceback, and without secrets."""

    exit_code: ExitCode = ExitCode.OTHER

    def __str__(self) -> str:
        return redact(super().__str__())


class ConfigurationError(StagelineError):
    """The configuration, the command line, or a file named there is wrong."""

    exit_code = ExitCode.WRONG_CONFIGURATION


class StoppedOnRequest(StagelineError):
    """A signal or a time limit asked the job to stop; its state is saved."""

    exit_code = ExitCode.STOPPED_ON_REQUEST


class TrainingFailed(StagelineError):
    """Training itself went wrong: the loss is not finite beyond what is tolerated."""

    exit_code = ExitCode.TRAINING_FAILED


class RankMissing(StagelineError):
    """The ranks did not find each other. Without a message on ranks that have nothing to add to another's."""

    exit_code = ExitCode.RANK_FAILED


class RankFailed(StagelineError):
    """A rank is not fit to go on, and all ranks have agreed on that."""

    exit_code = ExitCode.RANK_FAILED
