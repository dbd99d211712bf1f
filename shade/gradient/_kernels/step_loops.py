"""The sparse optimizers' loops in numba: line after line of 16, with the next lines already on their way from memory.

``last_L`` holds the step up to which each line has moved. A touched element's line has to come from memory whole, so
all of it is brought up to date, which costs a few vector operations. Tables have a column for each lag; ``rows_F9`` has
a step's coefficients at ``step % F``.

Legend: L lines of 16 · F longest lag + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shade._lazy import compiled
from shade.gradient._kernels import lanes
from shade.gradient._kernels.lines import LINE

# The processor's prefetcher does not see the pattern of ascending elements that are far apart, so each line is
# requested `_AHEAD` elements before its turn. That is faster than gathering and scattering 16 elements at a time.
_LINE, _AHEAD, _U64 = LINE, 64, np.uint64
# Intrinsics are called without their first argument, which no type checker knows.
add_linear: Any = lanes.add_linear
advance_adam: Any = lanes.advance_adam
advance_linear: Any = lanes.advance_linear
fetch: Any = lanes.fetch
is_any_small: Any = lanes.is_any_small
step_adam: Any = lanes.step_adam


@compiled
def _is_whole(indices: Any, k: Any, line: Any) -> Any:
    """Returns whether all of the line was touched whose first index is at ``k``; indices ascend, each once."""
    end = k + _LINE
    return end <= indices.size and _U64(indices[end - 1]) >> _U64(4) == line


@compiled
def apply_plain(x: Any, indices: Any, values: Any, gain: Any) -> None:
    """Moves the touched elements only."""
    last = indices.size - 1
    for k in range(indices.size):
        fetch(x, _U64(indices[min(k + _AHEAD, last)]))
        x[_U64(indices[k])] -= gain * values[k]


@compiled
def apply_linear(
    x: Any, b: Any, last_L: Any, indices: Any, values: Any, step: Any, table_4F: Any, gain_x: Any, gain_b: Any
) -> None:
    """Brings touched lines to this step, then adds the gradient's share."""
    now, last = _U64(step), indices.size - 1
    k = 0
    while k < indices.size:
        ahead = _U64(indices[min(k + _AHEAD, last)])
        fetch(x, ahead)
        fetch(b, ahead)
        line = _U64(indices[k]) >> _U64(4)
        lag = now - _U64(last_L[line])
        if lag:
            advance_linear(
                x, b, line << _U64(4), table_4F[0, lag], table_4F[1, lag], table_4F[2, lag], table_4F[3, lag]
            )
            last_L[line] = now
        if _is_whole(indices, k, line):
            # As threshold-v16 picks them: the gradient is one vector.
            add_linear(x, b, line << _U64(4), values, _U64(k), gain_x, gain_b)
            k += _LINE
        else:
            x[_U64(indices[k])] -= gain_x * values[k]
            b[_U64(indices[k])] += gain_b * values[k]
            k += 1


@compiled
def sweep_linear(x: Any, b: Any, last_L: Any, start: Any, stop: Any, step: Any, table_4F: Any) -> None:
    """Brings the lines of a range to this step."""
    now = _U64(step)
    for line in range(_U64(start), _U64(stop)):
        lag = now - _U64(last_L[line])
        if lag:
            advance_linear(
                x, b, line << _U64(4), table_4F[0, lag], table_4F[1, lag], table_4F[2, lag], table_4F[3, lag]
            )
            last_L[line] = now


@compiled
def _replay(x: Any, m: Any, v: Any, offset: Any, before: Any, now: Any, rows_F9: Any) -> None:
    """Takes one line from the step ``before`` to ``now``, step by step."""
    zeros = np.zeros(_LINE, np.float32)
    for step in range(before + _U64(1), now + _U64(1)):
        at = step % _U64(rows_F9.shape[0])
        step_adam(
            x,
            m,
            v,
            offset,
            zeros,
            _U64(0),
            rows_F9[at, 0],
            rows_F9[at, 1],
            rows_F9[at, 2],
            rows_F9[at, 3],
            rows_F9[at, 4],
            rows_F9[at, 5],
            rows_F9[at, 6],
            rows_F9[at, 7],
            rows_F9[at, 8],
        )


@compiled
def apply_adam(
    x: Any,
    m: Any,
    v: Any,
    last_L: Any,
    indices: Any,
    values: Any,
    step: Any,
    table_6F: Any,
    rows_F9: Any,
    replay: Any,
) -> None:
    """Brings touched lines to the step before, then takes this step with the gradient."""
    now, last = _U64(step), indices.size - 1
    at = now % _U64(rows_F9.shape[0])
    b1, a1, b2, a2, decay = rows_F9[at, 0], rows_F9[at, 1], rows_F9[at, 2], rows_F9[at, 3], rows_F9[at, 4]
    lr, scale, eps, coupled = rows_F9[at, 5], rows_F9[at, 6], rows_F9[at, 7], rows_F9[at, 8]
    g = np.zeros(_LINE, np.float32)
    k = 0
    while k < indices.size:
        ahead = _U64(indices[min(k + _AHEAD, last)])
        fetch(x, ahead)
        fetch(m, ahead)
        fetch(v, ahead)
        line = _U64(indices[k]) >> _U64(4)
        offset = line << _U64(4)
        lag = now - _U64(1) - _U64(last_L[line])
        if lag:
            # Written out here and in `sweep_adam`: a call that passes five arrays takes longer than the line.
            if replay or is_any_small(m, v, offset, table_6F[5, lag]):
                _replay(x, m, v, offset, now - _U64(1) - lag, now - _U64(1), rows_F9)
            else:
                advance_adam(
                    x,
                    m,
                    v,
                    offset,
                    table_6F[0, lag],
                    table_6F[1, lag],
                    table_6F[2, lag],
                    table_6F[3, lag],
                    table_6F[4, lag],
                )
        if _is_whole(indices, k, line):
            step_adam(x, m, v, offset, values, _U64(k), b1, a1, b2, a2, decay, lr, scale, eps, coupled)
            k += _LINE
        else:
            first = k
            while k < indices.size and _U64(indices[k]) >> _U64(4) == line:
                g[_U64(indices[k]) & _U64(15)] = values[k]
                k += 1
            step_adam(x, m, v, offset, g, _U64(0), b1, a1, b2, a2, decay, lr, scale, eps, coupled)
            for touched in range(first, k):
                g[_U64(indices[touched]) & _U64(15)] = np.float32(0)
        last_L[line] = now


@compiled
def sweep_adam(
    x: Any,
    m: Any,
    v: Any,
    last_L: Any,
    start: Any,
    stop: Any,
    step: Any,
    table_6F: Any,
    rows_F9: Any,
    replay: Any,
) -> None:
    """Brings the lines of a range to this step."""
    now = _U64(step)
    for line in range(_U64(start), _U64(stop)):
        lag = now - _U64(last_L[line])
        if lag:
            offset = line << _U64(4)
            if replay or is_any_small(m, v, offset, table_6F[5, lag]):
                _replay(x, m, v, offset, now - lag, now, rows_F9)
            else:
                advance_adam(
                    x,
                    m,
                    v,
                    offset,
                    table_6F[0, lag],
                    table_6F[1, lag],
                    table_6F[2, lag],
                    table_6F[3, lag],
                    table_6F[4, lag],
                )
            last_L[line] = now


def probe() -> None:
    """Compiles every loop for the types that it is called with."""
    x, m, v = (np.zeros(_LINE, dtype=np.float32) for _ in range(3))
    last_L, index = np.zeros(1, dtype=np.uint32), np.zeros(1, dtype=np.uint32)
    value, one = np.zeros(1, dtype=np.float32), np.float32(1)
    table_4F, table_6F = np.ones((4, 3), dtype=np.float32), np.ones((6, 3), dtype=np.float32)
    rows_F9 = np.ones((3, 9), dtype=np.float32)
    apply_plain(x, index, value, one)
    apply_linear(x, m, last_L, index, value, 1, table_4F, one, one)
    sweep_linear(x, m, last_L, 0, 1, 2, table_4F)
    apply_adam(x, m, v, last_L, index, value, 3, table_6F, rows_F9, False)
    sweep_adam(x, m, v, last_L, 0, 1, 4, table_6F, rows_F9, False)
