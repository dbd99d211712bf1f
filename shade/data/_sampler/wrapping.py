"""Tells which data sets around a `ShadeDataset` number its samples as it does; sampler and loader refuse the others."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, Subset

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
