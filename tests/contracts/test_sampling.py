"""What every sampling mode promises, run by every name in `MODES`."""

from __future__ import annotations

import numpy as np
import pytest

from shade.errors import ConfigError
from shade.importance import SCORES
from shade.policy import POLICIES
from shade.sampling import MODES, SamplingMode, Scores, Validation, base, large, num_steps, rank_order

N, G, SEED = 1003, 48, 7
MAY_REPEAT = {"pads"}


@pytest.fixture(autouse=True, params=["small", "large"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the small sets of these tests as `shade.sampling.large` draws large ones, too."""
    if request.param == "large":
        monkeypatch.setattr(base, "LARGE", 0)
        monkeypatch.setattr(large, "BUCKET", 64)


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> SamplingMode:
    return make(request.param)


def make(name: str, num_samples: int = N, global_batch: int = G, seed: int = SEED) -> SamplingMode:
    return MODES.get(name)(num_samples, global_batch, seed)


def name_of(mode: SamplingMode) -> str:
    return next(name for name in MODES if MODES.get(name) is type(mode))


def some_scores(num_samples: int = N, seen_fraction: float = 0.9) -> Scores:
    rng = np.random.default_rng(0)
    seen_N = rng.random(num_samples) < seen_fraction
    score_N = rng.gamma(1.0, 1.0, num_samples).astype(np.float32)
    return Scores(np.where(seen_N, score_N, np.float32(0)), seen_N)


CIRCUMSTANCES = {
    "resident_N": np.arange(N) % 5 == 0,
    "validation": Validation((0.1, 0.2, 0.3)),
}


def test_same_arguments_same_draw_bit_for_bit(mode: SamplingMode) -> None:
    np.random.seed(1)
    first = mode.draw(5, some_scores(), **CIRCUMSTANCES)
    np.random.seed(2)
    again = make(name_of(mode))
    again.draw(9, some_scores())  # whatever was drawn before leaves no trace
    second = again.draw(5, some_scores(), **CIRCUMSTANCES)
    assert first.order_K.tobytes() == second.order_K.tobytes()
    assert (first.weight_N is None) == (second.weight_N is None)
    if first.weight_N is not None and second.weight_N is not None:
        assert first.weight_N.tobytes() == second.weight_N.tobytes()
    assert repr(first.receipt) == repr(second.receipt)


def test_epochs_and_seeds_differ(mode: SamplingMode) -> None:
    base = mode.draw(5, some_scores()).order_K
    for other in (mode.draw(6, some_scores()), make(name_of(mode), seed=SEED + 1).draw(5, some_scores())):
        assert not np.array_equal(base[:200], other.order_K[:200])


@pytest.mark.parametrize("epoch", [0, 1, 2, 30])
def test_order_is_whole_steps_of_real_samples(mode: SamplingMode, epoch: int) -> None:
    draw = mode.draw(epoch, some_scores(), **CIRCUMSTANCES)
    order_K = draw.order_K
    assert draw.epoch == epoch
    assert order_K.dtype == np.int32
    assert order_K.min() >= 0
    assert order_K.max() < N
    assert len(order_K) == N or len(order_K) % G == 0
    assert draw.receipt.drawn == len(order_K)
    if name_of(mode) not in MAY_REPEAT:
        assert len(np.unique(order_K)) == len(order_K)


def test_weights_come_exactly_where_promised(mode: SamplingMode) -> None:
    weight_N = mode.draw(4, some_scores()).weight_N
    assert (weight_N is not None) == mode.uses_weights
    if weight_N is not None:
        assert weight_N.dtype == np.float32
        assert weight_N.shape == (N,)
        assert np.all(weight_N >= 1)


def test_works_before_any_score_and_with_none_seen(mode: SamplingMode) -> None:
    nothing = Scores(np.zeros(N, dtype=np.float32), np.zeros(N, dtype=bool))
    for scores in (None, nothing):
        draw = mode.draw(3, scores)
        assert len(draw.order_K) == N
        assert draw.weight_N is None


def test_all_scores_zero_is_no_accident(mode: SamplingMode) -> None:
    draw = mode.draw(3, Scores(np.zeros(N, dtype=np.float32), np.ones(N, dtype=bool)))
    assert len(draw.order_K) >= 0.6 * N


def test_a_sample_never_seen_is_drawn_at_least_as_often_as_a_seen_one(mode: SamplingMode) -> None:
    times_N = np.zeros(N)
    scores = some_scores()
    for epoch in range(2, 42):
        times_N += np.bincount(mode.draw(epoch, scores).order_K, minlength=N)
    assert times_N[~scores.seen_N].mean() >= times_N[scores.seen_N].mean()


def test_inputs_are_left_alone(mode: SamplingMode) -> None:
    scores = some_scores()
    before = scores.score_N.copy(), scores.seen_N.copy()
    mode.draw(3, scores, **CIRCUMSTANCES)
    np.testing.assert_array_equal(scores.score_N, before[0])
    np.testing.assert_array_equal(scores.seen_N, before[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 48])
def test_ranks_take_equal_steps_and_share_the_order(mode: SamplingMode, world_size: int) -> None:
    order_K = mode.draw(3, some_scores(), **CIRCUMSTANCES).order_K
    shares = [rank_order(order_K, rank, global_batch=G, world_size=world_size) for rank in range(world_size)]
    batch = G // world_size
    assert {-(-len(share) // batch) for share in shares} == {num_steps(len(order_K), G)}
    times = np.bincount(np.concatenate(shares), minlength=N) - np.bincount(order_K, minlength=N)
    assert times.min() >= 0
    assert times.sum() == max(0, world_size - (len(order_K) % G or world_size))  # nothing but the documented padding


@pytest.mark.parametrize(("num_samples", "global_batch"), [(1, 1), (1, 64), (3, 2), (64, 64), (65, 64), (100, 7)])
def test_tiny_data_sets(mode: SamplingMode, num_samples: int, global_batch: int) -> None:
    small = make(name_of(mode), num_samples, global_batch)
    draw = small.draw(4, some_scores(num_samples, seen_fraction=1.0), validation=Validation((0.1, 0.2)))
    assert 1 <= len(draw.order_K) <= num_samples
    assert len(draw.order_K) == num_samples or len(draw.order_K) % global_batch == 0


def test_names_the_policy_and_score_that_suit_it(mode: SamplingMode) -> None:
    assert mode.default_policy in POLICIES
    assert mode.default_score in SCORES


@pytest.mark.parametrize(("num_samples", "global_batch"), [(0, 8), (10, 0)])
def test_empty_settings_are_refused(mode: SamplingMode, num_samples: int, global_batch: int) -> None:
    with pytest.raises(ConfigError, match=r"expected .* got 0"):
        make(name_of(mode), num_samples, global_batch)
