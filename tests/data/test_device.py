"""Batches that go to a device ahead are the same batches, and the position is that of what was taken."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tests.data.corpora import ListSource
from trainer.data.loader import Batch, Loader, Share
from trainer.data.mixture import Mixture
from trainer.data.stream import TokenStream
from trainer.data.tokenizer import ByteTokenizer

TEXTS = [f"document {index} " + "x" * (index % 7) for index in range(40)]


def loader(device: torch.device | None, mask_documents: bool = True) -> Loader:
    stream = TokenStream(ListSource(TEXTS), ByteTokenizer(), epochs=1)
    return Loader(Mixture.of(stream, 8), Share(2), mask_documents=mask_documents, device=device)


def values(batch: Batch) -> list[torch.Tensor | None]:
    tensors = (batch.tokens, batch.labels, batch.documents)
    return [None if tensor is None else tensor.cpu() for tensor in tensors]


def assert_same(device: torch.device, mask_documents: bool) -> None:
    there, here = loader(device, mask_documents), loader(None, mask_documents)
    for expected, actual in zip(islice(here, 9), islice(there, 9), strict=True):
        assert actual.tokens.device.type == device.type
        for one, other in zip(values(expected), values(actual), strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
        # Others are on their way already.
        assert there.state_dict() == here.state_dict()
    there.close(), here.close()


@pytest.mark.parametrize("mask_documents", [False, True])
def test_batches_and_positions_do_not_depend_on_going_to_a_device(mask_documents: bool) -> None:
    assert_same(torch.device("cpu"), mask_documents)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_on_the_gpu_when_they_are_taken() -> None:
    assert_same(torch.device("cuda", torch.cuda.current_device()), mask_documents=True)
