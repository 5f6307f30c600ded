"""The planning half of the pipeline runs on a laptop without torch."""

import subprocess
import sys

PROGRAM = """
import sys
import parallelisms.pipeline.factory, parallelisms.pipeline.split, parallelisms.pipeline.bounds
import parallelisms.pipeline.csv, parallelisms.pipeline.verify, parallelisms.pipeline.simulate
from parallelisms.pipeline.schedules.catalogue import FAMILIES
from parallelisms.pipeline.setting import Costs, Setting
for family in FAMILIES:
    placement = family.place(2)
    setting = Setting(placement, 3, Costs.equal(placement.stages))
    parallelisms.pipeline.factory.build_schedule(family.name, setting)
print(sorted(name for name in ("torch", "trainer", "numpy") if name in sys.modules))
"""


def test_making_every_schedule_imports_neither_torch_nor_the_trainer():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
