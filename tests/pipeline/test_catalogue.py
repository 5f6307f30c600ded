import pytest

from parallelisms.pipeline.errors import UnknownScheduleError
from parallelisms.pipeline.schedules.catalogue import FAMILIES, find, names

TORCH = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
OURS = ("ZB-H1", "ZB-H2", "V-Half", "V-Min", "Auto")


@pytest.mark.parametrize("name", [*TORCH, *OURS])
def test_every_schedule_is_known_in_any_case(name):
    assert find(name) is find(name.lower()) is find(name.upper()) is find(f" {name.replace('-', '_')}")
    assert find(name).name == name


@pytest.mark.parametrize("name", TORCH)
def test_the_names_of_torchs_classes_are_known(name):
    assert find(f"Schedule{name}") is find(name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("ZBH1", "ZB-H1"), ("ZB1P", "ZB-H1"), ("ZBH2", "ZB-H2"), ("ZB2P", "ZB-H2"), ("ZBV", "ZBVZeroBubble")],
)
def test_names_of_the_papers_are_known(alias, name):
    assert find(alias).name == name


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(UnknownScheduleError) as refused:
        find("Interleave1F1")
    assert "'Interleave1F1'" in str(refused.value)
    assert "did you mean 'Interleaved1F1B'" in str(refused.value)
    assert all(name in str(refused.value) for name in names())


def test_no_spelling_belongs_to_two_schedules():
    for family in FAMILIES:
        assert all(find(spelling) is family for spelling in (family.name, *family.aliases))


def test_multi_stage_schedules_have_two_stages_per_rank_unless_told_otherwise():
    assert find("GPipe").place(4).stages == 4
    assert find("LoopedBFS").place(4).stages == 8
    assert find("LoopedBFS").place(4, 3).owners == (0, 1, 2, 3) * 3
