"""Which cores a process is bound to, on machines made of files as Linux describes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.cluster.affinity import Domain, bind, choose_cores, domain_of_device, read_domains

TWO = (Domain(0, tuple(range(8))), Domain(1, tuple(range(8, 16))))


def test_on_one_domain_without_a_gpu_nothing_is_bound() -> None:
    assert choose_cores(TWO[:1], 0, 4, None) == ()


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("with_gpus", [False, True])
def test_every_process_has_cores_of_one_domain_and_no_two_overlap(processes: int, with_gpus: bool) -> None:
    """Where there are enough cores, with GPUs spread over the domains in order."""
    seen: list[int] = []
    for rank in range(processes):
        near = rank * 2 // processes if with_gpus else None
        cores = choose_cores(TWO, rank, processes, near)
        assert len(cores) >= 2
        assert any(set(cores) <= set(domain.cores) for domain in TWO)
        seen += cores
    assert len(seen) == len(set(seen))


def test_too_few_cores_are_shared() -> None:
    assert choose_cores(TWO, 3, 16, None) == TWO[0].cores


def test_a_gpu_of_another_domain_than_expected_draws_its_process_there() -> None:
    assert choose_cores(TWO, 0, 4, 1) == TWO[1].cores


def test_domains_are_read_with_the_threads_of_a_core_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 2, 6})
    for number, cores in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        folder = tmp_path / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for core in range(8):
        folder = tmp_path / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert read_domains(tmp_path) == (Domain(0, (0, 4, 1, 5)), Domain(1, (2, 6)))


@pytest.mark.parametrize(("text", "domain"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_domain_of_a_gpu(tmp_path: Path, text: str | None, domain: int | None) -> None:
    if text is not None:
        (tmp_path / "0000:c1:00.0").mkdir()
        (tmp_path / "0000:c1:00.0" / "numa_node").write_text(text)
    assert domain_of_device("0000:C1:00.0", tmp_path) == domain


def test_a_refusal_of_the_system_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr("trainer.cluster.affinity.read_domains", lambda: TWO)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bind(0, 2, None)
    assert "not bound to cores" in caplog.text
