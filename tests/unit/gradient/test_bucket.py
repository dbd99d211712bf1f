"""Parameters in flat buckets: same values, same shapes, one memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shade.errors import ConfigError
from shade.gradient._compress.bucket import Bucket, plan_buckets


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64, 40))


def test_float32_parameters_become_views_and_keep_their_values() -> None:
    model = network()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    buckets = plan_buckets([{"params": list(model.parameters())}], bucket_bytes=1 << 20)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    for bucket in buckets:
        bucket.weights_D += 1.0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] + 1.0)
    assert sum(bucket.size for bucket in buckets) == sum(p.numel() for p in model.parameters())


def test_short_parameters_share_a_dense_bucket_and_the_front_comes_first() -> None:
    model = network()
    names = {parameter: name for name, parameter in model.named_parameters()}
    buckets = plan_buckets([{"params": list(model.parameters())}], names, bucket_bytes=4 * 40_000)
    assert [(bucket.is_dense, bucket.names) for bucket in buckets] == [
        (False, ("0.weight",)),
        (True, ("0.bias", "1.weight", "1.bias", "2.bias", "4.bias")),
        (False, ("2.weight", "4.weight")),
    ]


def test_groups_types_and_frozen_parameters_are_kept_apart() -> None:
    first, second, frozen, half = (nn.Parameter(torch.randn(64, 64)) for _ in range(4))
    frozen.requires_grad_(False)
    half.data = half.data.bfloat16()
    groups = [{"params": [first, frozen, half]}, {"params": [second]}]
    buckets = plan_buckets(groups)
    assert [(bucket.group, bucket.parameters) for bucket in buckets] == [(0, (first,)), (0, (half,)), (1, (second,))]


def test_strides_of_channels_last_survive_and_gradients_land_in_the_same_places() -> None:
    conv = nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last)
    reference = conv.weight.detach().clone()
    bucket = Bucket([conv.weight])
    assert torch.equal(conv.weight, reference)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    gradient, flat_D = torch.randn(conv.weight.shape), torch.empty(bucket.size)
    bucket.gather([gradient], flat_D, scale=0.5)
    bucket.weights_D -= flat_D
    assert torch.equal(conv.weight, reference - gradient * 0.5)


def test_an_expanded_parameter_gets_memory_of_its_own() -> None:
    parameter = nn.Parameter(torch.zeros(3, 1).expand(3, 4))
    bucket = Bucket([parameter])
    bucket.weights_D[1] = 7.0
    assert parameter.detach().tolist() == [[0, 7, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    bucket = Bucket([first, second])
    flat_D = torch.full((7,), 9.0)
    bucket.gather([torch.full((2, 2), 2.0, dtype=torch.bfloat16), None], flat_D)
    assert flat_D.tolist() == [2, 2, 2, 2, 0, 0, 0]
    bucket.gather([None, torch.sparse_coo_tensor([[1]], [5.0], (3,), check_invariants=False)], flat_D)
    assert flat_D.tolist() == [0, 0, 0, 0, 0, 5, 0]


@pytest.mark.parametrize("places", [[3], list(range(9))])
def test_half_precision_parameters_follow_their_master_weights(places: list[int]) -> None:
    parameter = nn.Parameter(torch.arange(12).reshape(3, 4).bfloat16())
    bucket = Bucket([parameter])
    assert bucket.is_master
    assert bucket.weights_D.tolist() == list(range(12))
    bucket.weights_D[places] += 0.125
    assert torch.equal(parameter.float().flatten(), torch.arange(12.0))
    bucket.publish(np.array(places, np.uint32))
    assert torch.equal(parameter.detach().flatten(), bucket.weights_D.bfloat16())
    with torch.no_grad():
        parameter.fill_(4.0)
    bucket.refresh()
    assert bucket.array().tolist() == [4.0] * 12


def test_master_weights_take_what_changed_in_place_and_keep_the_rest() -> None:
    parameter = nn.Parameter(torch.arange(12).reshape(3, 4).bfloat16())
    bucket = Bucket([parameter])
    bucket.weights_D += 2.0**-10  # less than bfloat16 holds of most
    bucket.publish()
    before_D = bucket.weights_D.clone()
    bucket.take_changes()
    assert torch.equal(bucket.weights_D, before_D)
    parameter.data.clamp_(max=5.0)
    bucket.take_changes()
    assert bucket.weights_D.tolist() == [*before_D.tolist()[:6], *[5.0] * 6]


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="trainable"):
        plan_buckets([{"params": [nn.Parameter(torch.ones(2), requires_grad=False)]}])
    phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="'phase'"):
        plan_buckets([{"params": [phase]}], {phase: "phase"})
    with pytest.raises(ConfigError, match="bucket_bytes"):
        plan_buckets([{"params": [nn.Parameter(torch.ones(2))]}], bucket_bytes=0)


def test_gradients_are_laid_out_as_the_bucket_was_made_whatever_a_script_binds_meanwhile() -> None:
    first, second = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))
    bucket, gradients = Bucket([first, second]), [torch.randn(8, 6), torch.randn(6)]
    first.data = torch.zeros(3, 3)
    laid_D = torch.empty(bucket.size)
    bucket.gather(gradients, laid_D)
    assert torch.equal(laid_D, torch.cat([each.flatten() for each in gradients]))
    with pytest.raises(ConfigError, match="as at the start"):
        bucket.rebind()
