"""torchdata's StatefulDataLoader with the state of a `ShadeSampler`: for any workers, and no loss is missing."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from shade.data import ShadeSampler
from shade.errors import ConfigError
from shade.installation import install_hint

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    raise ConfigError.of("the torchdata package", None, install_hint("ecosystem")) from error

__all__ = ["SampledDataLoader"]


class SampledDataLoader(StatefulDataLoader):  # type: ignore[misc]
    """A StatefulDataLoader whose state is where training is, not where workers are.

    Args:
        dataset: A `ShadeDataset`, or any other.
        batch_size: Of one rank.
        sampler: As for `ShadeSampler`, its arguments by name; or such a sampler.
        **options: As for `StatefulDataLoader`.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, sampler: ShadeSampler | dict[str, Any], **options: Any
    ) -> None:
        if isinstance(sampler, dict):
            sampler = ShadeSampler(dataset, batch_size=batch_size, **sampler)
        if sampler.batch_size != batch_size:
            raise ConfigError.of(f"the sampler's batch_size {sampler.batch_size}", batch_size, "give both one number")
        super().__init__(dataset, batch_size, sampler=sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """Says the epoch, as at the top of every epoch; the one that was loaded continues."""
        self.sampler.set_epoch(epoch)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state_dict["sampler"])
