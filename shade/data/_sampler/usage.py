"""Checks how a script uses a sampler: the data sets around its `ShadeDataset`, and the calls of the training loop.

Sampler and loader refuse data sets that number samples in another way. A loop that leaves out a call runs and looks
healthy, so a warning names the line to add.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from shade.data._transforms.randomness import kept_generators
from shade.errors import ConfigError


def check_wrapping(dataset: Any) -> None:
    """Refuses a data set that contains a `ShadeDataset` and numbers its samples otherwise.

    Args:
        dataset: What the sampler or the loader was given.

    Raises:
        ConfigError: Such a wrapper; the message has the line to write.
    """
    inside, known = [dataset], {id(dataset)}
    while inside:
        outer = inside.pop()
        found = getattr(outer, "datasets", None) or [getattr(outer, "dataset", None)]
        for inner in found if isinstance(found, list | tuple) else ():
            if id(inner) in known:
                continue
            known.add(id(inner))
            inside.append(inner)
            # The sampler deals the outer numbers, and the samples come with the inner ones.
            is_shade = hasattr(inner, "check_forecast")
            if is_shade and (isinstance(outer, Subset | ConcatDataset) or len(inner) != len(dataset)):
                name = type(outer).__name__
                inputs = "[first, second]" if isinstance(outer, ConcatDataset) else "data, indices"
                raise ConfigError.of(
                    f"the {name} inside the ShadeDataset, so that both number the samples alike",
                    f"a ShadeDataset inside the {name}",
                    f"write ShadeDataset({name}({inputs}), cache=…), and give that to sampler and loader",
                )


_ASKED = 64
"""Samples of a wrapper that are asked for."""


class _Asked(BaseException):
    """Carries the index that a wrapper asks the `ShadeDataset` inside for, past the wrapper's own handlers."""


def check_numbering(dataset: Any) -> None:
    """Refuses a data set around a `ShadeDataset` that gives samples in another order; reads none.

    Args:
        dataset: What the sampler was given.

    Raises:
        ConfigError: The wrapper asks for another sample than it is asked for.
    """
    inner = dataset
    while inner is not None and not hasattr(inner, "check_forecast"):
        inner = getattr(inner, "dataset", None)
    if inner is None or inner is dataset:
        return
    last = len(dataset) - 1
    indices = sorted({number * last // (_ASKED - 1) for number in range(_ASKED)})
    with kept_generators():
        asked, again = ([_asked_for(dataset, inner, index) for index in indices] for _ in range(2))
    # A wrapper that draws the samples that it looks at has no numbering to check.
    if asked != again:
        return
    for index, found in zip(indices, asked, strict=True):
        if found is not None and found != index:
            raise ConfigError.of(
                "a data set around the ShadeDataset that numbers samples as it does, because reports have its numbers",
                f"sample {found} as number {index} of the {type(dataset).__name__}",
                "a data set that reorders samples belongs inside, ShadeDataset(Reordered(data), cache=…)",
            )


def _asked_for(dataset: Any, inner: Any, index: int) -> int | None:
    """Returns the sample that a wrapper asks for first, or None if it asks for none."""

    def ask(indices: Any) -> Any:
        raise _Asked(int(indices[0]) % len(inner))

    # ShadeDataset's __getitem__ calls __getitems__, so this is reached either way.
    inner.__dict__["__getitems__"] = ask
    try:
        dataset[index]
    except _Asked as asked:
        return int(asked.args[0])
    except Exception:  # noqa: BLE001 - the user's code, which fails when the loader calls it, too
        return None
    finally:
        del inner.__dict__["__getitems__"]
    return None


LINES = {
    "set_epoch": ("sampler.set_epoch(epoch)", "at the top of every epoch; until then epochs are counted"),
    "report": ("sampler.report(indices, losses)", "after the losses are known; until then every epoch is full"),
    "weights": ("(losses * sampler.weights(indices)).mean().backward()", "or the gradient is biased"),
}
"""Call → the line to add, and where or why."""


class ForgottenCallWarning(UserWarning):
    """The training loop leaves out a call that its sampling mode depends on; the message names the line to add."""


class UsageWarnings:
    """Records which calls one training loop makes.

    Args:
        dataset: What the sampler was given; None if its numbers need no check.
    """

    def __init__(self, dataset: Any = None) -> None:
        self._unchecked = dataset
        self.made: set[str] = set()
        """Calls that the loop ever made. The sampler adds to it in the middle of a step, where a method call would
        cost."""
        self._warned: set[str] = set()

    def check_numbering(self) -> None:
        """Checks the numbers of the data set's samples, once."""
        # Not before the first report: without reports another order does no harm.
        if self._unchecked is not None:
            check_numbering(self._unchecked)
            self._unchecked = None

    def warn_of_part(self, num_reported: int, batch_size: int) -> None:
        """Warns of a report of a part of a batch."""
        self._warn_once(
            "part",
            f"report() got {num_reported} samples of a batch of {batch_size}. If the loader's batch_size is not "
            "the sampler's, give both the same: a run that resumes inside a batch takes all of it again. If the "
            "batch is reported in parts, leave it so",
        )

    def warn_of_place(self, step: int) -> None:
        """Warns of a state whose place is unknown: nothing was reported, and no DataLoader asks for the indices."""
        self._warn_once(
            "place",
            f"the state says step {step}, because no loss was reported and the sampler does not know what took its "
            "indices; add the line `sampler.report(indices, losses)`, or load batches of the "
            "sampler's batch_size with DataLoader, StatefulDataLoader or ShadeLoader, and nothing in between",
        )

    def warn_of_fetched_ahead(self, num_got: int) -> None:
        """Warns of a state after a process's first steps, when the loop has got more batches than it did steps."""
        self._warn_once(
            "fetched ahead",
            f"the state says step {num_got} after fewer steps of training, because the loop had got that many "
            "batches and no loss was reported. If the loop fetches ahead of training, add the line "
            "`sampler.report(indices, losses)`, or save later: after the second step, or at the epoch's end",
        )

    def warn_of_length(self, epoch: int, num_steps: int, num_full: int) -> None:
        """Warns of an epoch that is shorter than the first, whose length the loop asked for."""
        if num_steps < num_full and "len" in self.made and "total_steps" not in self.made:
            self._warn_once(
                "length",
                f"epoch {epoch} has {num_steps} steps, a full epoch {num_full}. A schedule that counts epochs × "
                "len(loader) steps does not reach its end; give it sampler.total_steps(epochs)",
            )

    def require(self, call: str) -> None:
        """Warns if one of the calls of `LINES` was never made."""
        if call not in self.made:
            line, why = LINES[call]
            message = f"the training loop never called sampler.{call}(); add the line `{line}` {why}"
            self._warn_once(call, message, ForgottenCallWarning)

    def _warn_once(self, name: str, message: str, category: type[UserWarning] = UserWarning) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(message, category, stacklevel=5)
