"""metrics.jsonl, TensorBoard and Weights & Biases over restarts; peaks of known devices only (cases O3, O5, L8)."""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigurationError
from trainer.flops import peak_flops, peak_flops_of
from trainer.metrics import MetricsFile, read_metrics
from trainer.tracking import open_trackers


def write(folder: Path, resumed: int, steps: range) -> None:
    metrics = MetricsFile(folder, resumed)
    for step in steps:
        metrics.write({"step": step, "loss": 1 / step})
    metrics.close()


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


# metrics.jsonl


def test_each_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "run", 0)
    metrics.write({"step": 1, "loss": 0.1})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.1}\n'
    metrics.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_is_null_in_valid_json(tmp_path: Path, bad: float) -> None:
    metrics = MetricsFile(tmp_path, 0)
    metrics.write({"step": 1, "loss": bad, "grad_norm": 2.0, "skipped": True})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": 2.0,
        "skipped": True,
    }


def test_steps_after_the_resumed_one_are_dropped_and_come_once(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8))
    straight = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, 4, range(5, 8))
    assert (tmp_path / "metrics.jsonl").read_bytes() == straight


def test_a_validation_row_is_kept_or_dropped_with_its_step(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, 0)
    for step in (1, 2):
        metrics.write({"step": step, "loss": 1.0})
        metrics.write({"step": step, "validation_loss": 2.0})
    MetricsFile(tmp_path, 1).close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 1, "loss": 1.0}, {"step": 1, "validation_loss": 2.0}]


def test_a_run_that_begins_anew_begins_with_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 2))
    assert steps_in(tmp_path) == [1]


@given(st.integers(0, 6), st.integers(0, 400))
def test_a_file_cut_anywhere_by_a_kill_goes_on_as_if_it_had_not_been(
    tmp_path_factory: pytest.TempPathFactory, resumed: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, 0, range(1, 9))
    path = folder / "metrics.jsonl"
    straight = path.read_bytes()
    # What is there after a kill is at least what was there when the checkpoint was saved.
    until_checkpoint = len(b"".join(straight.splitlines(keepends=True)[:resumed]))
    path.write_bytes(straight[: max(until_checkpoint, min(cut, len(straight)))])
    write(folder, resumed, range(resumed + 1, 9))
    assert path.read_bytes() == straight


def test_a_file_that_need_not_change_is_not_rewritten(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    write(tmp_path, 3, range(4, 5))
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_costs_rows_but_not_the_run_nor_other_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsFile(tmp_path, 0)
    metrics.write({"step": 1, "loss": 0.5})
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (35, limits[1]))
    try:
        metrics.write({"step": 2, "loss": 0.5})  # fits in part
        metrics.write({"step": 3, "loss": 0.5})  # not at all
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    metrics.write({"step": 4, "loss": 0.5})
    assert steps_in(tmp_path) == [1, 4]
    assert "step 3 could not be written" in caplog.text


# TensorBoard and Weights & Biases


def config(**metrics: Any) -> Any:
    table = {"enable_tensorboard": False, "save_tb_folder": "tb", "enable_wandb": False, "rank_0_only": True}
    return SimpleNamespace(
        metrics=SimpleNamespace(**{**table, **metrics}), model_dump=lambda mode: {"training": {"steps": 3}}
    )


def track(folder: Path, resumed: int, steps: range, **metrics: Any) -> None:
    trackers = open_trackers(config(**metrics), folder, "tiny", resumed)
    for step in steps:
        for tracker in trackers:
            tracker.log(step, {"loss": 1 / step})
            tracker.log(step, {"validation_loss": 2 / step})
    for tracker in trackers:
        tracker.close()


def test_no_tracker_is_opened_unless_configured(tmp_path: Path) -> None:
    assert open_trackers(config(), tmp_path, "tiny", 0) == []


def test_ranks_other_than_0_track_only_where_all_ranks_do(tmp_path: Path) -> None:
    assert open_trackers(config(enable_tensorboard=True), tmp_path, "tiny", 0, rank=1) == []
    (tracker,) = open_trackers(
        config(enable_tensorboard=True, rank_0_only=False), tmp_path, "tiny", 0, rank=1
    )
    tracker.close()
    assert list((tmp_path / "tb" / "rank_1").iterdir())


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path, 0, range(1, 6), enable_tensorboard=True)
    track(tmp_path, 3, range(4, 8), enable_tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    for tag in ("loss", "validation_loss"):
        assert [event.step for event in events.Scalars(tag)] == list(range(1, 8))


class FakeRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.steps: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)

    def finish(self) -> None: ...


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Stands in for the package: the runs that were begun."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
    return runs


def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_its_step_never_goes_back(
    tmp_path: Path, wandb_runs: list[FakeRun]
) -> None:
    """Case O3: a new wandb run per restart."""
    for resumed, steps in ((0, range(1, 6)), (2, range(3, 5)), (4, range(5, 8))):
        track(tmp_path, resumed, steps, enable_wandb=True)
    assert len({run.options["id"] for run in wandb_runs}) == 1
    assert {run.options["resume"] for run in wandb_runs} == {"allow"}
    sent = [step for run in wandb_runs for step in run.steps]
    assert sent == sorted(sent)
    assert [sent.count(step) for step in range(1, 8)] == [2] * 7  # loss and validation loss


def test_a_run_that_begins_anew_is_a_new_wandb_run(tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    track(tmp_path, 0, range(1, 6), enable_wandb=True)
    track(tmp_path, 0, range(1, 3), enable_wandb=True)
    assert len({run.options["id"] for run in wandb_runs}) == 2
    assert set(wandb_runs[1].steps) == {1, 2}


def test_wandb_that_is_missing_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'stageline\[wandb\]'"):
        open_trackers(config(enable_wandb=True), tmp_path, "tiny", 0)


def test_wandb_that_cannot_start_is_an_error_that_says_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("no API key configured\nUse wandb login")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
    with pytest.raises(
        ConfigurationError, match=r"no API key configured Use wandb login; WANDB_MODE=offline"
    ):
        open_trackers(config(enable_wandb=True), tmp_path, "tiny", 0)


@pytest.mark.slow
def test_wandb_offline_keeps_both_parts_of_a_resumed_run_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(tmp_path, 0, range(1, 4), enable_wandb=True)
    track(tmp_path, 2, range(3, 6), enable_wandb=True)
    run_id = json.loads((tmp_path / "wandb" / "run.json").read_text())["id"]
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}


# Peaks


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_a_known_device_has_its_own_peak(name: str, peak: float) -> None:
    assert peak_flops_of(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H1000",
        "NVIDIA A100X",
        "NVIDIA A16",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA H20",
        "NVIDIA L400S",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "Tesla V100-SXM2-32GB",  # has no bf16
        "AMD Instinct MI250X / MI250",  # one of two, which differ
        "AMD Radeon Graphics",
        "",
    ],
)
def test_an_unknown_device_has_no_peak_and_never_that_of_another(name: str) -> None:
    """Case O5: MFU computed with another device's peak."""
    assert peak_flops_of(name) is None


def test_a_cpu_and_a_type_without_a_certain_peak_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, "bfloat16") == peak_flops(cuda, "float16") == 989.4e12
    assert peak_flops(cuda, "float32") is None
    assert peak_flops(torch.device("cpu"), "bfloat16") is None
