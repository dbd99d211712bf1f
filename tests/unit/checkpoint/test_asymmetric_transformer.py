"""On a real transformer, measured: the partitions are the whole state, and most of it is the backward pass's."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._strategies.asymmetric import Asymmetric
from shade.checkpoint._strategies.overlap import PROFILED_STEPS

transformers: Any = pytest.importorskip("transformers", reason="pip install 'torch-shade[bench]'")


SIZES = {"n_layer": 3, "n_embd": 384, "n_head": 4, "vocab_size": 512, "n_positions": 64}
"""Large enough for arithmetic to take longer than Python, which a backward pass has less of."""
ATTEMPTS = 3
"""Others on this machine may take ten forward passes' time; not thirty's."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other measure the machine's other work, not the model's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gpt2() -> torch.nn.Module:
    """Small, with random weights, and no dropout to draw for."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **SIZES, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_partitions_of_gpt2() -> None:
    model = gpt2()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 512, (4, 64))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer has its state from now on
    with Checkpointer(run=f"gpt2-{secrets.token_hex(4)}", strategy="asymmetric", every="never") as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        made = checkpointer._strategy
        assert isinstance(made, Asymmetric)
        made._windows.cores_left = lambda: 1  # type: ignore[method-assign]
        for _ in range(ATTEMPTS):
            for _ in range(PROFILED_STEPS + 1):
                step()
            checkpointer.save()
            forward, backward = made.partitions
            step()
            checkpointer.wait_committed()
            steady_bytes = checkpointer.list()[0].record.num_bytes - _unsteady_bytes(checkpointer)
            if sum(forward) < sum(backward):
                break
        checkpointer._tiers.shared_memory.remove()
    assert sum(forward) + sum(backward) == steady_bytes, "no byte twice, and none left out"
    assert len(forward) > SIZES["n_layer"] * 8
    assert len(backward) > SIZES["n_layer"] * 8
    assert sum(forward) < sum(backward)
    assert statistics.mean(forward) < statistics.mean(backward)


def _unsteady_bytes(checkpointer: Checkpointer) -> int:
    """Of what is copied before any window: generators and the like."""
    captured = checkpointer._contents.capture(0, 1)
    return sum(spec.num_bytes for name, spec in captured.specs().items() if name not in captured.steady)
