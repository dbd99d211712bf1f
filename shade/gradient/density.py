"""How dense to send while a training warms up: a quarter at first, then exponentially down to the final density.

Early gradients are large, change direction quickly, and are worth most when fresh; what is delayed then is delayed at
its most harmful. So the first steps send much and the link is paid for it (Deep Gradient Compression, §3.3: 25 %, 6.25
%, 1.56 % … by epoch; here smoothly, by step).
"""

from __future__ import annotations

from dataclasses import dataclass

from shade.errors import ConfigError


@dataclass(frozen=True)
class WarmUp:
    """A density for each step.

    Args:
        density: The final one, in (0, 1].
        num_steps: From which step on it holds; 0: from the start.
        first_density: At step 0; not used where the final one is larger.

    Raises:
        ConfigError: One of them out of its range.
    """

    density: float
    num_steps: int = 0
    first_density: float = 0.25

    def __post_init__(self) -> None:
        for name in ("density", "first_density"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError.of(f"a {name} in (0, 1]", getattr(self, name), "0.01 sends one element in a hundred")
        if self.num_steps < 0:
            raise ConfigError.of("num_steps ≥ 0", self.num_steps, "0 warms nothing up")

    def at(self, step: int) -> float:
        """The density of that step."""
        if step >= self.num_steps or self.first_density <= self.density:
            return self.density
        return self.first_density * float((self.density / self.first_density) ** (step / self.num_steps))
