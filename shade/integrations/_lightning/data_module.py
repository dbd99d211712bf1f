"""Lightning's DataModule with a `ShadeSampler`, whose place is in every checkpoint.

Lightning loads the state of a loader only within an epoch, and counts the steps of a loader once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from shade.data import ShadeDataset, ShadeSampler
from shade.errors import ConfigError


class EpochLoader(DataLoader[Any]):
    """A DataLoader as Lightning counts: the rest of an epoch is as long as the epoch."""

    def __len__(self) -> int:
        return self.sampler.num_steps  # type: ignore[attr-defined,no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing; that it has a state says that a checkpoint within an epoch is welcome."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the module's state is the sampler's."""


def without_indices(batch: list[Any]) -> Any:
    """Collates samples of a `ShadeDataset` as those of the data set inside."""
    return default_collate([each[0] if len(each) == 2 else each[:-1] for each in batch])


class ShadeDataModule(LightningDataModule):  # type: ignore[misc]
    """Training data through a cache, by a sampler whose place is in every checkpoint.

    Args:
        dataset: A map-style data set; or a function that makes a `ShadeDataset` with more arguments.
        batch_size: Of one rank.
        cache: As for `ShadeDataset`.
        num_workers: Of the loader.
        **options: As for `ShadeSampler`. With ``mode="uniform"``, batches are those of the data set inside; otherwise
            each has its indices, too, and the Trainer needs ``reload_dataloaders_every_n_epochs=1``.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, cache: str | None = "local://", num_workers: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self._make: Callable[[], ShadeDataset] = dataset if callable(dataset) else lambda: ShadeDataset(dataset, cache)
        self._num_workers, self._options = num_workers, {"batch_size": batch_size} | options

    @override
    def setup(self, stage: str) -> None:
        self.dataset = self._make()
        self.sampler = ShadeSampler(self.dataset, **self._options)
        self._collate = without_indices if self.sampler.scores() is None else None
        reloads = self.trainer.reload_dataloaders_every_n_epochs
        if self._collate is None and reloads != 1:
            cure = 'Lightning counts the steps of a loader once; or mode="uniform"'
            raise ConfigError.of("reload_dataloaders_every_n_epochs=1", reloads, cure)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        self.sampler.set_epoch(self.trainer.current_epoch)
        options: dict[str, Any] = {"num_workers": self._num_workers, "collate_fn": self._collate}
        return EpochLoader(self.dataset, self.sampler.batch_size, sampler=self.sampler, **options)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state_dict)

    @override
    def teardown(self, stage: str) -> None:
        self.sampler.close()
        self.dataset.close()
