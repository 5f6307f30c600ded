"""Train a model: parse the configuration, plan the run, carry the plan out.

Started by run_train.sh, torchrun or srun, one process for each rank; alone, it is rank 0 of 1.
"""

import os
import sys

from trainer.cluster.ranks import rank_variables
from trainer.config.load import load
from trainer.config.rules import check_for_training
from trainer.errors import StagelineError, StoppedOnRequest
from trainer.stop import StopRequest


def main(argv: list[str]) -> int:
    """Run this rank's share of the job; returns the exit code."""
    stop = StopRequest.listen()
    try:
        os.environ.update(rank_variables(os.environ))
        loaded = load(argv)
        # Only now: a wrong configuration is refused before torch is imported.
        from trainer.process import RankIdentity, RankProcess

        identity = RankIdentity.from_environment()
        check_for_training(loaded, identity.world_size)

        from trainer.console import set_up_logging
        from trainer.plan.plan import make_plan
        from trainer.run import Run
        from trainer.run_folder import RunFolder

        plan = make_plan(loaded.config, identity.world_size)
        folder = RunFolder.of(loaded)
        set_up_logging(folder.path, identity.rank)
        with RankProcess(identity, loaded.config, plan, folder.failure_record, stop) as process:
            run = Run(loaded, plan, process, folder)
            run.resume()
            run.train()
            run.finish()
    except StoppedOnRequest as stopped:
        return stopped.exit_code  # the run has said so
    except StagelineError as error:
        if str(error):  # else another rank says it
            print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
