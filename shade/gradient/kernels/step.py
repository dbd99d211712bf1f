"""The sparse optimizers' loops in numba: line after line of 16, with the next lines already on their way from memory.

`shade.gradient.optim.arrays` says what each does; here is how. A touched element's line has to come from memory whole,
so all of it is brought up to date, which costs a few vector operations. Elements come in ascending order, far apart:
the processor's own look-ahead does not see the pattern, so each line is asked for `_AHEAD` elements before its turn.
That is faster than gathering and scattering 16 elements at a time.

Legend: L lines of 16 · F longest lag + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shade.gradient.kernels.compiling import compiled
from shade.gradient.kernels.lanes import LINE, advance_adam, advance_linear, fetch, is_any_small, step_adam

_AHEAD = 64
_U64 = np.uint64


@compiled
def apply_plain(x: Any, indices: Any, values: Any, gain: Any) -> None:
    """Moves the touched elements and nothing else."""
    last = indices.size - 1
    for k in range(indices.size):
        fetch(x, _U64(indices[min(k + _AHEAD, last)]))  # type: ignore[call-arg]
        x[_U64(indices[k])] -= gain * values[k]


@compiled
def apply_linear(
    x: Any, b: Any, last_L: Any, indices: Any, values: Any, step: Any, table_4F: Any, gain_x: Any, gain_b: Any
) -> None:
    """Brings touched lines to this step, then adds the gradient's share."""
    now, last = _U64(step), indices.size - 1
    for k in range(indices.size):
        ahead = _U64(indices[min(k + _AHEAD, last)])
        fetch(x, ahead)  # type: ignore[call-arg]
        fetch(b, ahead)
        index = _U64(indices[k])
        line = index >> _U64(4)
        lag = now - _U64(last_L[line])
        if lag:
            advance_linear(
                x, b, line << _U64(4), table_4F[0, lag], table_4F[1, lag], table_4F[2, lag], table_4F[3, lag]
            )
            last_L[line] = now
        x[index] -= gain_x * values[k]
        b[index] += gain_b * values[k]


@compiled
def sweep_linear(x: Any, b: Any, last_L: Any, start: Any, stop: Any, step: Any, table_4F: Any) -> None:
    """Brings the lines of a range to this step."""
    now = _U64(step)
    for line in range(_U64(start), _U64(stop)):
        lag = now - _U64(last_L[line])
        if lag:
            advance_linear(  # type: ignore[call-arg]
                x, b, line << _U64(4), table_4F[0, lag], table_4F[1, lag], table_4F[2, lag], table_4F[3, lag]
            )
            last_L[line] = now


@compiled
def _step(x: Any, m: Any, v: Any, offset: Any, g: Any, row: Any) -> None:
    step_adam(  # type: ignore[call-arg]
        x, m, v, offset, g, row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8]
    )


@compiled
def _catch_up(
    x: Any, m: Any, v: Any, line: Any, before: Any, now: Any, table_6F: Any, rows_F9: Any, replay: Any, zeros: Any
) -> None:
    """Brings one line from the step ``before`` to ``now``: by the table, or step by step."""
    lag, offset = now - before, line << _U64(4)
    if replay or is_any_small(m, v, offset, table_6F[5, lag]):  # type: ignore[call-arg]
        for step in range(before + _U64(1), now + _U64(1)):
            _step(x, m, v, offset, zeros, rows_F9[step % _U64(rows_F9.shape[0])])
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
    row = rows_F9[now % _U64(rows_F9.shape[0])]
    zeros, g = np.zeros(LINE, np.float32), np.zeros(LINE, np.float32)
    k = 0
    while k < indices.size:
        ahead = _U64(indices[min(k + _AHEAD, last)])
        fetch(x, ahead)  # type: ignore[call-arg]
        fetch(m, ahead)
        fetch(v, ahead)
        line = _U64(indices[k]) >> _U64(4)
        before = _U64(last_L[line])
        if before + _U64(1) < now:
            _catch_up(x, m, v, line, before, now - _U64(1), table_6F, rows_F9, replay, zeros)
        first = k
        while k < indices.size and _U64(indices[k]) >> _U64(4) == line:
            g[_U64(indices[k]) & _U64(15)] = values[k]
            k += 1
        _step(x, m, v, line << _U64(4), g, row)
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
    zeros = np.zeros(LINE, np.float32)
    for line in range(_U64(start), _U64(stop)):
        before = _U64(last_L[line])
        if before < now:
            _catch_up(x, m, v, line, before, now, table_6F, rows_F9, replay, zeros)
            last_L[line] = now


def probe() -> None:
    """Compiles all of them, for the types that they are called with."""
    x, m, v = (np.zeros(LINE, dtype=np.float32) for _ in range(3))
    last_L, index = np.zeros(1, dtype=np.uint32), np.zeros(1, dtype=np.uint32)
    value, one = np.zeros(1, dtype=np.float32), np.float32(1)
    table_4F, table_6F = np.ones((4, 3), dtype=np.float32), np.ones((6, 3), dtype=np.float32)
    rows_F9 = np.ones((3, 9), dtype=np.float32)
    apply_plain(x, index, value, one)
    apply_linear(x, m, last_L, index, value, 1, table_4F, one, one)
    sweep_linear(x, m, last_L, 0, 1, 2, table_4F)
    apply_adam(x, m, v, last_L, index, value, 3, table_6F, rows_F9, False)
    sweep_adam(x, m, v, last_L, 0, 1, 4, table_6F, rows_F9, False)
