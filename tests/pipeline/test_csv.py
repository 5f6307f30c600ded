import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.csv import has_communication, microbatches_of, placement_of, read_csv, write_csv
from parallelisms.pipeline.errors import CsvError
from parallelisms.pipeline.setting import Placement
from tests.pipeline.settings import Case, cases


def parsed(*rows):
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


@given(cases(max_microbatches=8), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back_the_same(tmp_path, case: Case, complete: bool, sharded: bool):
    lists = case.family.generate(case.setting)
    if complete:
        lists = add_communication(lists, case.setting.placement, sharded)
    write_csv(lists, tmp_path / "schedule.csv")
    read = read_csv(tmp_path / "schedule.csv")
    assert read == lists
    assert placement_of(read) == case.setting.placement
    assert microbatches_of(read) == case.setting.microbatches
    assert has_communication(read) == (complete and case.setting.ranks > 1)


def test_idle_cells_are_skipped_and_overlapped_pairs_are_taken_apart(tmp_path):
    (tmp_path / "torch.csv").write_text("0F0,,(0F1;0B0)OVERLAP_F_B,0B1\n,1F0,1B0,1F1,1B1,,\n\n")
    assert read_csv(tmp_path / "torch.csv") == parsed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_cell_that_is_no_action_is_refused_with_file_row_and_cell(tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(CsvError, match=r"bad\.csv, row 2, cell 2: '1Q0' is not an action"):
        read_csv(tmp_path / "bad.csv")


def test_files_that_are_missing_empty_or_not_text_are_refused(tmp_path):
    with pytest.raises(CsvError, match="cannot be read"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("\n\n")
    with pytest.raises(CsvError, match="is empty"):
        read_csv(tmp_path / "empty.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CsvError, match="cannot be read"):
        read_csv(tmp_path / "binary.csv")
    with pytest.raises(CsvError, match="cannot be written"):
        write_csv((), tmp_path / "no_folder" / "schedule.csv")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0", "0B0"), "stage 0 is on rank 0 and, by 0B0, on rank 1"),
        (("0F0", "2F0"), "no rank has actions of stage 1"),
        (("0F0", "", "1F0"), "rank 1 has no actions"),
    ],
)
def test_lists_without_a_placement_are_refused(rows, message):
    with pytest.raises(CsvError, match=message):
        placement_of(parsed(*rows))


def test_any_placement_is_read_off_the_lists():
    assert placement_of(parsed("0F0 3F0 4F0", "1F0 2F0")) == Placement((0, 1, 1, 0, 0))
