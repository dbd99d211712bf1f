"""Error feedback in torch's operations: on the CPU here, on an accelerator where there is one; and as on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shade.errors import ConfigError, NonFiniteGradientError, StateMismatchError
from shade.gradient._compress.compressor import COMPRESSORS, Key, wanted_count
from shade.gradient._compress.correction import MomentumCorrection
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=needs_cuda)]
every_place = pytest.mark.parametrize("device", DEVICES)
every_compressor = pytest.mark.parametrize("name", list(COMPRESSORS))
LARGE = 300_003


def memory(name: str, size: int, device: str, quantiser: str = "bf16", **settings: float) -> DeviceErrorFeedback:
    """A bucket's memory on a device."""
    chosen = COMPRESSORS.get(name)(), QUANTISERS.get(quantiser)()
    return DeviceErrorFeedback(size, *chosen, torch.device(device), **settings)


def gradients(size: int, num_steps: int, device: str) -> list[torch.Tensor]:
    """Noise."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for _ in range(num_steps)]


@every_place
@every_compressor
@pytest.mark.parametrize("size", [0, 1, 7, 100, LARGE])
def test_sent_and_kept_make_up_what_came_in(name: str, size: int, device: str) -> None:
    feedback = memory(name, size, device)
    fed, sent = np.zeros(size), np.zeros(size)
    unit = 16 if name == "threshold-v16" else 1
    for step, gradient_D in enumerate(gradients(size, 9, device)):
        picked = feedback.compress(gradient_D, 0.02, Key(5, step, 0))
        assert (np.diff(picked.indices_K.astype(np.int64)) > 0).all()
        wanted = min(size, unit * wanted_count(-(-size // unit), 0.02))
        assert 0.9 * wanted <= picked.count + unit - 1
        assert picked.count <= 1.1 * wanted
        fed += gradient_D.cpu().numpy()
        if step % 4 == 1:
            feedback.absorb(picked)
        elif step % 4 == 2:
            feedback.undo()
            fed -= gradient_D.cpu().numpy()
        else:
            sent += picked.dense()
    assert np.abs(fed - sent - feedback.residual_D.cpu().numpy()).max(initial=0) < 1e-4


@every_place
@pytest.mark.parametrize("name", ["topk", "random-k"])
def test_an_exact_choice_is_the_host_s(name: str, device: str) -> None:
    host = ErrorFeedback(LARGE, COMPRESSORS.get(name)(), QUANTISERS.get("none")(), correction=MomentumCorrection(0.9))
    there = memory(name, LARGE, device, "none", correction=MomentumCorrection(0.9))
    for step, gradient_D in enumerate(gradients(LARGE, 4, device)):
        ours = there.compress(gradient_D, 0.01, Key(5, step, 0))
        theirs = host.compress(gradient_D.cpu(), 0.01, Key(5, step, 0))
        np.testing.assert_array_equal(ours.indices_K, theirs.indices_K)
        np.testing.assert_allclose(ours.values_K, theirs.values_K, rtol=1e-5, atol=1e-6)
    moved = memory(name, LARGE, device, "none", correction=MomentumCorrection(0.9))
    moved.load_state_dict(host.state_dict())
    np.testing.assert_array_equal(moved.residual_D.cpu().numpy(), host.residual_D)
    host.load_state_dict(there.state_dict())
    np.testing.assert_array_equal(host.residual_D, there.residual_D.cpu().numpy())


@every_place
@pytest.mark.parametrize("name", ["threshold-v", "threshold-v16"])
def test_a_threshold_catches_the_energy_of_the_best(name: str, device: str) -> None:
    feedback, unit = memory(name, 300_000, device, "none"), 16 if name == "threshold-v16" else 1
    for step, gradient_D in enumerate(gradients(300_000, 5, device)):
        energy_U = (feedback.residual_D + gradient_D).double().square().view(-1, unit).sum(dim=1)
        picked = feedback.compress(gradient_D, 0.01, Key(5, step, 0))
        best = float(torch.topk(energy_U, picked.count // unit).values.sum())
        assert (picked.values_K.astype(np.float64) ** 2).sum() >= 0.999 * best


@every_place
@every_compressor
def test_what_is_not_finite_changes_nothing(name: str, device: str) -> None:
    feedback = memory(name, 1000, device, correction=MomentumCorrection(0.5))
    first, second = gradients(1000, 2, device)
    feedback.compress(first, 0.01, Key(5, 0, 0))
    before = {key: tensor.clone() for key, tensor in feedback.state_dict().items()}
    second[77] = torch.inf
    with pytest.raises(NonFiniteGradientError):
        feedback.compress(second, 0.01, Key(5, 1, 0))
    assert all(torch.equal(tensor, before[key]) for key, tensor in feedback.state_dict().items())
    with pytest.raises(ConfigError, match="undo"):
        feedback.undo()


@every_place
def test_a_rank_that_leaves_hands_on_what_it_kept(device: str) -> None:
    leaving, staying = (memory("topk", 1000, device, correction=MomentumCorrection(0.5)) for _ in range(2))
    for feedback, gradient_D in zip((leaving, staying), gradients(1000, 2, device), strict=True):
        feedback.compress(gradient_D, 0.01, Key(5, 0, 0))
    expected = {key: staying.state_dict()[key] + tensor for key, tensor in leaving.state_dict().items()}
    staying.merge_from(leaving.state_dict())
    assert all(torch.equal(tensor, expected[key]) for key, tensor in staying.state_dict().items())


def test_bad_arguments_are_named() -> None:
    feedback = memory("topk", 8, "cpu")
    for gradient_D, density, complaint in (
        (torch.zeros(8), 0.0, "density"),
        (torch.zeros(9), 0.5, "8 elements"),
        (torch.zeros(8, dtype=torch.int32), 0.5, "8 elements"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            feedback.compress(gradient_D, density, Key(5, 0, 0))
    with pytest.raises(ConfigError, match="undo"):
        feedback.undo()
    with pytest.raises(StateMismatchError, match="8 elements"):
        feedback.load_state_dict({"residual": torch.zeros(9)})
