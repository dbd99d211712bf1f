"""What every importance score promises, run by every name in `SCORES`, through the table."""

from __future__ import annotations

import numpy as np
import pytest

from shade.errors import ConfigError, UnknownNameError
from shade.importance import SCORES, ImportanceTable
from shade.types import Floats, Indices, Stateful

N, B = 300, 32
Batches = list[tuple[Indices, Floats]]


@pytest.fixture(params=list(SCORES))
def table(request: pytest.FixtureRequest) -> ImportanceTable:
    return ImportanceTable(N, request.param)


def some_batches(count: int, seed: int = 0) -> Batches:
    """Reports as training makes them, with duplicates within batches and some losses that are not finite."""
    rng = np.random.default_rng(seed)
    batches: Batches = []
    for _ in range(count):
        loss_B = rng.gamma(1, 1, B).astype(np.float32)
        loss_B[rng.random(B) < 0.05] = rng.choice([np.nan, np.inf, -np.inf])
        batches.append((rng.integers(0, N, B), loss_B))
    return batches


def bytes_of(table: ImportanceTable) -> bytes:
    return table.score_N.tobytes() + table.seen_N.tobytes() + str(table.num_ignored).encode()


@pytest.mark.filterwarnings("ignore:report.. got a loss")
def test_scores_stay_finite_and_not_negative(table: ImportanceTable) -> None:
    for index_B, loss_B in some_batches(50):
        table.update(index_B, loss_B)
    table.update(np.arange(4), np.array([3e38, -3e38, 0.0, 1e-45], dtype=np.float32))
    table.update(np.arange(4), np.array([-3e38, 3e38, 0.0, 1e-45], dtype=np.float32))
    assert np.isfinite(table.score_N).all()
    assert (table.score_N >= 0).all()


def test_only_reported_samples_change(table: ImportanceTable) -> None:
    reported = np.array([3, 200, 77])
    table.update(reported, np.array([1.0, 2.0, 3.0], dtype=np.float32))
    assert set(np.flatnonzero(table.seen_N)) == set(reported)
    assert set(np.flatnonzero(table.score_N)) == set(reported)


def test_larger_loss_larger_score(table: ImportanceTable) -> None:
    table.update(np.array([5, 6, 7]), np.array([2.0, 1.0, 3.0], dtype=np.float32))
    assert table.score_N[6] < table.score_N[5] < table.score_N[7]


@pytest.mark.filterwarnings("ignore:report.. got a loss that is")
def test_loss_that_is_not_finite_is_ignored_and_counted(table: ImportanceTable) -> None:
    table.update(np.array([1, 2]), np.array([1.0, 2.0], dtype=np.float32))
    before = table.score_N.copy()
    table.update(np.array([1, 2, 3]), np.array([np.nan, np.inf, -np.inf], dtype=np.float32))
    np.testing.assert_array_equal(table.score_N, before)
    assert not table.seen_N[3]
    assert table.num_ignored == 3


def test_the_last_of_duplicates_counts(table: ImportanceTable) -> None:
    twin = ImportanceTable(N, table.score)
    table.update(np.array([4, 9, 4]), np.array([1.0, 2.0, 3.0], dtype=np.float32))
    twin.update(np.array([8, 9, 4]), np.array([1.0, 2.0, 3.0], dtype=np.float32))
    assert table.score_N[4] == twin.score_N[4]


@pytest.mark.filterwarnings("ignore:report.. got a loss that is")
def test_state_round_trip_goes_on_identically(table: ImportanceTable) -> None:
    assert isinstance(table, Stateful)
    batches = some_batches(40)
    for batch in batches[:20]:
        table.update(*batch)
    state = table.state_dict()
    resumed = ImportanceTable(N, table.score)
    resumed.update(*some_batches(1, seed=9)[0])  # whatever was there is replaced
    resumed.load_state_dict(state)
    assert bytes_of(resumed) == bytes_of(table)
    for batch in batches[20:]:
        table.update(*batch)
        resumed.update(*batch)
    assert bytes_of(resumed) == bytes_of(table)
    fresh = ImportanceTable(N, table.score)
    fresh.load_state_dict(state)  # the state is a copy: updates since have not reached it
    assert bytes_of(fresh) != bytes_of(table)


def test_snapshot_is_a_copy(table: ImportanceTable) -> None:
    table.update(np.array([1]), np.array([1.0], dtype=np.float32))
    snapshot = table.scores()
    table.update(np.array([1, 2]), np.array([5.0, 6.0], dtype=np.float32))
    assert snapshot.score_N[2] == 0
    assert not snapshot.seen_N[2]


@pytest.mark.parametrize("wrong", [-1, N, 2**40, -(2**63)])
def test_index_outside_is_refused_and_nothing_changes(table: ImportanceTable, wrong: int) -> None:
    with pytest.raises(ConfigError, match=str(wrong)):
        table.update(np.array([1, wrong]), np.array([1.0, 2.0], dtype=np.float32))
    assert not table.seen_N.any()


def test_lengths_and_types_are_checked(table: ImportanceTable) -> None:
    with pytest.raises(ConfigError, match="reduction='none'"):
        table.update(np.array([1, 2]), np.array([1.0], dtype=np.float32))
    with pytest.raises(ConfigError, match="int64"):
        table.update(np.array([1.0]), np.array([1.0], dtype=np.float32))  # type: ignore[arg-type]


def test_empty_report_is_fine(table: ImportanceTable) -> None:
    table.update(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
    assert not table.seen_N.any()


def test_state_of_something_else_is_refused(table: ImportanceTable) -> None:
    with pytest.raises(ConfigError, match="data set"):
        table.load_state_dict(ImportanceTable(N + 1, table.score).state_dict())
    other = next(name for name in SCORES if name != table.score)
    with pytest.raises(ConfigError, match="resume with the score"):
        table.load_state_dict(ImportanceTable(N, other).state_dict())


@pytest.mark.filterwarnings("ignore:report.. got a loss that is")
def test_a_score_that_was_not_chosen_is_that_of_the_loaded_state(table: ImportanceTable) -> None:
    """So a run of a version with another default continues as it began."""
    for batch in some_batches(5):
        table.update(*batch)
    default = next(name for name in SCORES if name != table.score)
    other = ImportanceTable(N, None, default)
    assert other.score == default
    other.load_state_dict(table.state_dict())
    assert (other.score, other.takes_losses) == (table.score, table.takes_losses)
    for batch in some_batches(5, seed=1):
        table.update(*batch)
        other.update(*batch)
    assert bytes_of(other) == bytes_of(table)


def test_unknown_score_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="grad-norm, loss, rank, target-grad"):
        ImportanceTable(N, "los")


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_samples"):
        ImportanceTable(0)
