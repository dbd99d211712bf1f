"""The sparse optimizers' loops in numpy, the same to the last bit as `_kernels.step_loops`.

All work on whole lines of 16 elements. ``last_L`` holds the step up to which each line has moved. A line that lags is
brought up to date as a whole. Tables have a column for each lag; ``rows_F9`` has a step's coefficients at ``step % F``.

Legend: L lines of 16 · n lines at hand · F longest lag + 1.
"""

from __future__ import annotations

import numpy as np

from shade.gradient._kernels.arrays import LINE, Places
from shade.types import Floats, Indices


def apply_plain(x: Floats, indices: Places, values: Floats, gain: np.float32) -> None:
    """Moves the touched elements only."""
    x[indices] -= gain * values


def apply_linear(
    x: Floats,
    b: Floats,
    last_L: Places,
    indices: Places,
    values: Floats,
    step: int,
    table_4F: Floats,
    gain_x: np.float32,
    gain_b: np.float32,
) -> None:
    """Brings touched lines to this step, then adds the gradient's share."""
    _advance_linear(x, b, last_L, np.unique(indices >> 4), step, table_4F)
    x[indices] -= gain_x * values
    b[indices] += gain_b * values


def sweep_linear(x: Floats, b: Floats, last_L: Places, start: int, stop: int, step: int, table_4F: Floats) -> None:
    """Brings the lines of a range to this step."""
    lines = start + np.flatnonzero(last_L[start:stop] != step)
    _advance_linear(x, b, last_L, lines, step, table_4F)


def _advance_linear(x: Floats, b: Floats, last_L: Places, lines: Indices | Places, step: int, table_4F: Floats) -> None:
    xx, xb, bx, bb = table_4F[:, step - last_L[lines].astype(np.int64), None]
    x_L, b_L = x.reshape(-1, LINE), b.reshape(-1, LINE)
    x_n, b_n = x_L[lines], b_L[lines]
    x_L[lines] = x_n + (xx * x_n + xb * b_n)
    b_L[lines] = bx * x_n + bb * b_n
    last_L[lines] = step


def apply_adam(
    x: Floats,
    m: Floats,
    v: Floats,
    last_L: Places,
    indices: Places,
    values: Floats,
    step: int,
    table_6F: Floats,
    rows_F9: Floats,
    replay: bool,
) -> None:
    """Brings touched lines to the step before, then takes this step with the gradient."""
    lines, places = np.unique(indices >> 4, return_inverse=True)
    _catch_up(x, m, v, last_L, lines[last_L[lines] + 1 < step], step - 1, table_6F, rows_F9, replay)
    g_n = np.zeros((len(lines), LINE), dtype=np.float32)
    g_n[places, indices & 15] = values
    _step(x, m, v, lines, g_n, rows_F9[step % len(rows_F9)])
    last_L[lines] = step


def sweep_adam(
    x: Floats,
    m: Floats,
    v: Floats,
    last_L: Places,
    start: int,
    stop: int,
    step: int,
    table_6F: Floats,
    rows_F9: Floats,
    replay: bool,
) -> None:
    """Brings the lines of a range to this step."""
    lines = start + np.flatnonzero(last_L[start:stop] != step)
    _catch_up(x, m, v, last_L, lines, step, table_6F, rows_F9, replay)


def _catch_up(
    x: Floats,
    m: Floats,
    v: Floats,
    last_L: Places,
    lines: Indices | Places,
    step: int,
    table_6F: Floats,
    rows_F9: Floats,
    replay: bool,
) -> None:
    """Brings lines that lag to a step: by the table, or step by step."""
    x_L, m_L, v_L = (array.reshape(-1, LINE) for array in (x, m, v))
    before_n = last_L[lines].astype(np.int64)
    keep_m, keep_v, decay, size, floor, least = table_6F[:, step - before_n, None]
    is_small_n = ((m_L[lines] != 0) & ~(v_L[lines] >= least)).any(axis=1) | replay
    far = ~is_small_n
    x_n, m_n, v_n = x_L[lines[far]], m_L[lines[far]], v_L[lines[far]]
    x_L[lines[far]] = x_n + (decay[far] * x_n - size[far] * m_n / (np.sqrt(v_n) + floor[far]))
    m_L[lines[far]] = keep_m[far] * m_n
    v_L[lines[far]] = keep_v[far] * v_n
    near, since = lines[is_small_n], before_n[is_small_n]
    for each in range(int(since.min(initial=step)) + 1, step + 1):
        late = near[since < each]
        _step(x, m, v, late, np.zeros((len(late), LINE), dtype=np.float32), rows_F9[each % len(rows_F9)])
    last_L[lines] = step


def _step(x: Floats, m: Floats, v: Floats, lines: Indices | Places, g_n: Floats, row: Floats) -> None:
    """One whole step of some lines."""
    b1, a1, b2, a2, decay, lr, scale, eps, coupled = row
    x_L, m_L, v_L = (array.reshape(-1, LINE) for array in (x, m, v))
    x_n = x_L[lines]
    g_n = g_n + coupled * x_n
    m_n = b1 * m_L[lines] + a1 * g_n
    v_n = b2 * v_L[lines] + a2 * (g_n * g_n)
    x_L[lines] = (x_n + decay * x_n) - lr * m_n / (np.sqrt(v_n) * scale + eps)
    m_L[lines], v_L[lines] = m_n, v_n
