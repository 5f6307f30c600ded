"""Where a run keeps its files; section 5 of the design names them for other programs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.load import Loaded, config_to_toml
from trainer.environment import describe_environment
from trainer.run_state import Phase, RunState, read_state, write_state
from trainer.secrets import redact

if TYPE_CHECKING:
    from trainer.plan.plan import Plan


@dataclass(frozen=True)
class RunFolder:
    """The folder `[job] dump_folder`, by default outputs/<name of the configuration>."""

    path: Path

    @classmethod
    def of(cls, loaded: Loaded) -> RunFolder:
        configured = loaded.config.job.dump_folder
        return cls(Path(configured) if configured else Path("outputs") / loaded.name)

    @property
    def failure_record(self) -> Path:
        """The first cause of the last failure, as JSON."""
        return self.path / "failure.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that is trained at first use."""
        return self.path / "tokenizer"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline"

    def describe(self, loaded: Loaded, plan: Plan) -> None:
        """Write the effective configuration, the plan, and the environment of this start. On one rank only."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_state(self.path, RunState.begin())
        (self.path / "config.toml").write_text(redact(config_to_toml(loaded.config)), encoding="utf-8")
        (self.path / "plan.json").write_text(json.dumps(plan.sections(), indent=1) + "\n", encoding="utf-8")
        environment = describe_environment(plan.layout.world_size)
        (self.path / "environment.json").write_text(
            json.dumps(environment, indent=1) + "\n", encoding="utf-8"
        )

    def ended(self, phase: Phase, step: int) -> None:
        """Write that the run has ended, and after which step. On one rank only."""
        state = read_state(self.path) or RunState.begin()
        write_state(self.path, replace(state, phase=phase, step=step, written=time.time()))
