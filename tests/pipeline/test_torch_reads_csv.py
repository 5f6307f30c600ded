"""What we write, torch's own runtime loads and trains with: the same gradients as one process."""

import pytest
import torch
from torch import nn

from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.communicate import compute_only
from parallelisms.pipeline.csv import read_csv, write_csv
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Setting
from tests.distributed.ranks import run_ranks

WIDTH, MICROBATCHES = 6, 5


def layers(count):
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, MICROBATCHES * 2, WIDTH, generator=generator).unbind()


def loss(output, target):
    return (output - target).square().mean()


def train_with_torch(rank, path, format_, owners):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    modules = layers(len(owners))
    mine = [stage for stage, owner in enumerate(owners) if owner == rank]
    stages = [PipelineStage(modules[s], s, len(owners), torch.device("cpu")) for s in mine]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss)
    runtime._load_csv(str(path), format=format_)
    x, target = data()
    runtime.step(*([x] if 0 in mine else []), target=target if len(owners) - 1 in mine else None)
    return {stage: modules[stage].weight.grad for stage in mine}


def reference(count):
    modules = layers(count)
    for x, target in zip(*(tensor.chunk(MICROBATCHES) for tensor in data()), strict=True):
        (loss(nn.Sequential(*modules)(x), target) / MICROBATCHES).backward()
    return [module.weight.grad for module in modules]


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "V-Min"])
def test_torchs_runtime_trains_with_our_file(tmp_path, name, format_):
    placement = find(name).place(2)
    setting = Setting(placement, MICROBATCHES, Costs.equal(placement.stages))
    schedule = build_schedule(name, setting, sharded=True)
    lists = compute_only(schedule.actions) if format_ == "compute_only" else schedule.actions
    write_csv(lists, tmp_path / "ours.csv")
    results = run_ranks(train_with_torch, 2, tmp_path / "ours.csv", format_, placement.owners)
    gradients = results[0] | results[1]
    for stage, wanted in enumerate(reference(placement.stages)):
        torch.testing.assert_close(torch.as_tensor(gradients[stage]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_we_read_and_prove_what_torch_writes(tmp_path, name):
    placement = find(name).place(2)
    file = tmp_path / "torchs.csv"
    run_ranks(write_with_torch, 2, name, file, placement.owners)
    setting = Setting(placement, 4, Costs.equal(placement.stages))
    schedule = build_schedule("CSV", setting, csv=file)
    assert compute_only(schedule.actions) == compute_only(read_csv(file))
    assert any(action.kind is Kind.SEND_ACTIVATION for action in schedule.actions[0])
    assert schedule.prediction.step >= schedule.prediction.bound


def write_with_torch(rank, name, path, owners):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    modules = layers(len(owners))
    mine = [stage for stage, owner in enumerate(owners) if owner == rank]
    stages = [PipelineStage(modules[s], s, len(owners), torch.device("cpu")) for s in mine]
    schedule = get_schedule_class(name)(stages, 4, loss_fn=loss)
    if rank == 0:
        schedule._dump_csv(str(path), format="compute_only")
