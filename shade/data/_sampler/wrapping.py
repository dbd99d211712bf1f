"""Tells which data sets around a `ShadeDataset` number its samples as it does; sampler and loader refuse the others.

The types are checked at once. A wrapper of a user's own is asked for samples when the first loss is reported: without
reports its order does no harm.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, Subset

from shade.data._transforms.randomness import kept_generators
from shade.errors import ConfigError


def check_wrapping(dataset: Any) -> None:
    """Refuses a data set that contains a `ShadeDataset` and numbers its samples otherwise.

    The sampler deals the outer numbers, and the samples come with the inner ones.

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
    if asked != again:  # it draws the samples that it looks at
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

    inner.__dict__["__getitems__"] = ask  # which its __getitem__ calls
    try:
        dataset[index]
    except _Asked as asked:
        return int(asked.args[0])
    except Exception:  # noqa: BLE001 - the user's code, which fails when the loader calls it, too
        return None
    finally:
        del inner.__dict__["__getitems__"]
    return None
