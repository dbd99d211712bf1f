"""The draw of each epoch: made at most once, on every rank from the same scores.

Legend: N data set · K drawn in an epoch.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from shade.data._sampler.cache_planner import CachePlanner
from shade.data._sampler.saved_draws import SavedDraws, SharedDraws, draw_from, load_draw
from shade.data._sampler.shuffle_window import ShuffleWindow
from shade.errors import ConfigError
from shade.importance import ImportanceTable, ScoreMerger
from shade.sampling import MODES, SamplingMode
from shade.sampling.base import Draw, Scores, Validation
from shade.types import Floats


def chosen_mode(
    name: str, num_samples: int, global_batch: int, seed: int, options: dict[str, Any], known: dict[str, Any]
) -> tuple[SamplingMode, dict[str, Any]]:
    """Makes a sampling mode.

    Args:
        name: Of `shade.sampling.MODES`.
        num_samples: N.
        global_batch: Samples of all ranks in a step.
        seed: The same on every rank.
        options: What the user asked for, None where not; refused by a mode that does not take it.
        known: What the mode gets if it takes it and if it is not None.

    Returns:
        The mode, and the options that it was made with.

    Raises:
        ConfigError: An option that the mode does not take, or one out of range.
    """
    mode_class = MODES.get(name)
    accepted = inspect.signature(mode_class).parameters
    for option, value in options.items():
        if value is not None and option not in accepted:
            raise ConfigError.of(f"no {option} with mode {name!r}", value, f"leave {option} out or choose another mode")
    used = {option: value for option, value in (options | known).items() if value is not None and option in accepted}
    return mode_class(num_samples, global_batch, seed, **used), used


class EpochDraws:
    """The draws of one sampler.

    Args:
        mode: Draws.
        merger: Of the ranks' reports, which the draws follow.
        shuffle: False: the drawn samples in ascending order.
        epochs: Epochs of the run, if known.
        planner: Of the cache, if there is one.
        window: Brings an order of shards into one in which blocks are read once.
        shared: Holds large draws once a machine.
    """

    def __init__(
        self,
        mode: SamplingMode,
        merger: ScoreMerger,
        *,
        shuffle: bool,
        epochs: int | None,
        planner: CachePlanner | None,
        window: ShuffleWindow | None,
        shared: SharedDraws | None,
    ) -> None:
        assert isinstance(merger.table, ImportanceTable)
        self.mode, self.table, self._merger = mode, merger.table, merger
        self._shuffle, self._last_epoch = shuffle, None if epochs is None else epochs - 1
        self._planner, self._window, self._shared = planner, window, shared
        self._made: dict[int, Draw] = {}
        self._saved = SavedDraws()
        self._accuracies: list[float] = []

    def of(self, epoch: int) -> Draw:
        """Returns the draw of an epoch, made now if it is the first call."""
        if epoch not in self._made:
            found = None if self._planner is None else self._planner.draw_of_leader(epoch)
            # The draw of the job whose stream this one takes.
            if found is not None:
                self._made[epoch] = draw_from(epoch, *found, num_samples=self.table.num_samples)
                return self._made[epoch]
            draw = self._made[epoch] = self._own(epoch)
            if self._planner is not None:
                self._planner.publish_draw(epoch, draw.order_K, draw.weight_N)
        return self._made[epoch]

    def made(self, epoch: int) -> Draw | None:
        """Returns the draw of an epoch if it is made already."""
        return self._made.get(epoch)

    @property
    def epochs_made(self) -> list[int]:
        """Returns the epochs that are drawn and not forgotten, ascending."""
        return sorted(self._made)

    def ahead_of(self, epoch: int) -> Draw | None:
        """Returns the draw of the next epoch; None if the mode does not draw ahead, or if this epoch is the last."""
        # Its scores are up to an epoch old when they are used, which changes the variance of the gradient and not its
        # mean (decision 0004).
        return self.of(epoch + 1) if self.mode.draws_ahead and epoch != self._last_epoch else None

    def forget_before(self, epoch: int) -> None:
        """Drops the draws of the epochs before this one."""
        for past in [each for each in self._made if each < epoch]:
            del self._made[past]

    def _own(self, epoch: int) -> Draw:
        scores, resident_N = self.scores(), None if self._planner is None else self._planner.resident_N

        def make() -> Draw:
            validation = Validation(tuple(self._accuracies))
            draw = self.mode.draw(epoch, scores, resident_N=resident_N, validation=validation)
            draw = draw if self._window is None else self._window.ordered(draw)
            return draw if self._shuffle else Draw(draw.epoch, np.sort(draw.order_K), draw.weight_N, draw.receipt)

        causes = (resident_N, self._accuracies, *(() if scores is None else (scores.score_N, scores.seen_N)))
        return make() if self._shared is None else self._shared.of(epoch, causes, make)

    def scores(self) -> Scores | None:
        """Returns the scores by all reports so far; None before the first."""
        self._merger.flush()
        # Not a copy: what is made of the table is made before the next report.
        table = self.table
        return Scores(table.score_N, table.seen_N) if table.seen_N.any() else None

    def take_losses(self) -> Floats | None:
        """Returns the last loss of every sample that was reported since the last call (NaN: none), and clears them;
        None if the reports are not losses."""
        if not self.table.takes_losses:
            return None
        self._merger.flush()
        return self.table.take_losses()

    def report_validation(self, accuracy: float) -> None:
        """Adds to the history of validation, which `pads` follows."""
        self._accuracies.append(float(accuracy))

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Returns the draws of an epoch and of the next, and all that later draws follow from."""
        if not self._merger.is_closed:  # a checkpointer that is closed after its sampler still asks
            self._merger.flush()
        kept = [self._made[each] for each in (epoch, epoch + 1) if each in self._made]
        return {
            # In a tuple, which torch.distributed.checkpoint takes as a whole: of a dict it loads the keys that a new
            # sampler has, which are none.
            "draws": ({draw.epoch: self._saved.of(draw) for draw in kept},),
            "table": {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in self.table.state_dict().items()
            },
            "accuracies": list(self._accuracies),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict`. Raises ConfigError, and changes nothing, if an order does not match its hash or if
        the scores are of another data set or another score."""
        num_samples = self.table.num_samples
        (draws,) = state["draws"]
        made = {int(epoch): load_draw(int(epoch), each, num_samples) for epoch, each in draws.items()}
        self.table.load_state_dict(state["table"])
        self._made, self._accuracies = made, list(state["accuracies"])

    def close(self) -> None:
        """Leaves the memory that the ranks of this machine share. Safe to call twice."""
        self._shared = None
