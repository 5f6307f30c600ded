import pytest

from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.csv import write_csv
from parallelisms.pipeline.errors import (
    DeadlockError,
    IllegalSettingError,
    MemoryCapError,
    ScheduleError,
    UnknownScheduleError,
)
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules.gpipe import gpipe
from parallelisms.pipeline.setting import Costs, Placement, Setting

SETTING = Setting(Placement.looped(2, 1), 3, Costs.equal(2))


def test_a_schedule_comes_with_its_proof_and_prediction():
    schedule = build_schedule("1f1b", SETTING)
    assert (schedule.name, schedule.microbatches) == ("1F1B", 3)
    assert schedule.placement == SETTING.placement
    assert schedule.proof.peak_activations == (2, 1)
    assert schedule.prediction.step == schedule.prediction.bound == 12
    assert not any(action.kind.value == "UNSHARD" for action in schedule.actions[0])


def test_sharded_stages_are_gathered_and_reduced():
    schedule = build_schedule("GPipe", SETTING, sharded=True)
    assert {"UNSHARD", "RESHARD", "REDUCE_GRAD"} <= {action.kind.value for action in schedule.actions[0]}


def test_a_wrong_name_or_setting_is_a_schedule_error():
    with pytest.raises(UnknownScheduleError):
        build_schedule("1F2B", SETTING)
    with pytest.raises(IllegalSettingError):
        build_schedule("1F1B", Setting(Placement.looped(2, 2), 3, Costs.equal(4)))
    with pytest.raises(IllegalSettingError):
        build_schedule("1F1B", Setting(SETTING.placement, 0, SETTING.costs))
    assert issubclass(UnknownScheduleError, ScheduleError)
    assert issubclass(IllegalSettingError, ScheduleError)


def test_a_schedule_over_the_memory_limit_is_refused_with_both_figures():
    capped = Setting(SETTING.placement, 3, SETTING.costs, memory_cap=2.0)
    assert build_schedule("1F1B", capped).proof.peak_share == (2.0, 1.0)
    with pytest.raises(
        MemoryCapError, match="GPipe holds the activations of 3 microbatches on rank 0, over the limit of 2"
    ):
        build_schedule("GPipe", capped)


@pytest.mark.parametrize("name", ["1F1B", "LoopedBFS"])
def test_on_a_single_stage_every_schedule_is_forward_and_backward_in_turn(name):
    schedule = build_schedule(name, Setting(Placement((0,)), 3, Costs.equal(1)))
    assert schedule.name == name
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0B0 0F1 0B1 0F2 0B2"


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("sharded_file", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_is_a_schedule(tmp_path, complete, sharded_file, sharded):
    lists = gpipe(SETTING)
    if complete:
        lists = add_communication(lists, SETTING.placement, sharded_file)
    write_csv(lists, tmp_path / "mine.csv")
    schedule = build_schedule("anything", SETTING, csv=tmp_path / "mine.csv", sharded=sharded)
    assert schedule.name == "CSV"
    assert schedule.actions == build_schedule("GPipe", SETTING, sharded=sharded).actions


def test_a_file_for_another_placement_or_number_of_microbatches_is_refused(tmp_path):
    write_csv(gpipe(SETTING), tmp_path / "mine.csv")
    with pytest.raises(
        IllegalSettingError,
        match=r"stages on ranks \[0, 1\], the configuration has them on ranks \[0, 1, 2\]",
    ):
        build_schedule("CSV", Setting(Placement.looped(3, 1), 3, Costs.equal(3)), csv=tmp_path / "mine.csv")
    with pytest.raises(IllegalSettingError, match="is for 3 microbatches, the configuration has 4"):
        build_schedule("CSV", Setting(SETTING.placement, 4, SETTING.costs), csv=tmp_path / "mine.csv")


def test_a_file_that_would_hang_is_refused(tmp_path):
    (tmp_path / "cycle.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    setting = Setting(SETTING.placement, 2, SETTING.costs)
    with pytest.raises(
        DeadlockError, match="rank 0 waits at 0B0 for 1SEND_B0 of rank 1; rank 1 waits at 1F1"
    ):
        build_schedule("CSV", setting, csv=tmp_path / "cycle.csv")


def test_a_file_validates_on_its_own_placement(tmp_path):
    (tmp_path / "odd.csv").write_text("0F0,3F0,4F0,4B0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    setting = Setting(Placement((0, 1, 1, 0, 0)), 1, Costs.equal(5))
    trained = build_schedule("CSV", setting, csv=tmp_path / "odd.csv")
    assert trained.prediction.step == trained.prediction.bound == 15
    validated = build_schedule("CSV", setting, csv=tmp_path / "odd.csv", forward_only=True)
    assert validated.prediction.step == 5
