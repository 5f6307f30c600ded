"""What several values must be together: each rule a function named after it, in a file per subject.

A rule takes the configuration and the world size (None where it is not known yet) and yields a Problem for each
way in which it is broken. It is silent where another rule already speaks.
"""

from trainer.config.report import Problem
from trainer.config.rules.collect import check, check_files, check_for_planning, check_for_training, notices

__all__ = ["Problem", "check", "check_files", "check_for_planning", "check_for_training", "notices"]
