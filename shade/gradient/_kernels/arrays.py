"""The passes over a bucket in numpy, a tile at a time, for machines without a working numba; they define the results.

A tile and its scratch arrays stay in the second-level cache, so memory is read and written once here too. What remains
is some overhead a tile and a few passes within the cache.

The sparse optimizers' loops follow, the same to the last bit as `_kernels.step_loops`. All work on whole lines of 16
elements. ``last_L`` holds the step up to which each line has moved. A line that lags is brought up to date as a whole.
Tables have a column for each lag; ``rows_F9`` has a step's coefficients at ``step % F``.

Legend: D bucket · L lines of 16 · n given lines · F longest lag + 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shade.types import Bools, Floats, Indices

LINE = 16
"""Elements of a cache line."""
TILE = 2**14
"""Elements between two checks of the room that is left: outputs need room for a tile more than is picked."""
OVERFLOW = -1
"""Returned instead of a count when the room did not suffice."""

ALIGNMENT_BYTES = 64
"""Where the memory for a rest begins: streaming stores write whole lines of the cache."""
Places = npt.NDArray[np.uint32]


def aligned_zeros(size: int) -> Floats:
    """Returns zeros, float32 (size,), that begin at a multiple of `ALIGNMENT_BYTES`."""
    room = np.zeros(size + ALIGNMENT_BYTES // 4, dtype=np.float32)
    start = -room.ctypes.data % ALIGNMENT_BYTES // 4
    return room[start : start + size]


def pick_elements(
    gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, indices: Places, values: Floats
) -> int:
    """Adds two arrays, moves the large elements of the sum to a list, and writes the rest.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        rest_D: From `aligned_zeros`; becomes the sum, 0 where picked.
        threshold: An element is picked unless its magnitude is below; so NaN is picked.
        indices: Becomes the picked places, ascending.
        values: As long; becomes their sums.

    Returns:
        The number of picked elements. Or `OVERFLOW` if ``indices`` had less room than the next tile is long; then
        ``rest_D`` is undefined.
    """
    magnitude, is_below = np.empty(TILE, dtype=np.float32), np.empty(TILE, dtype=np.bool_)
    count, limit = 0, np.float32(threshold)
    for start in range(0, gradient_D.size, TILE):
        if count + min(TILE, gradient_D.size - start) > len(indices):
            return OVERFLOW
        tile = rest_D[start : start + TILE]
        np.add(gradient_D[start : start + TILE], residual_D[start : start + TILE], out=tile)
        np.abs(tile, out=magnitude[: tile.size])
        np.less(magnitude[: tile.size], limit, out=is_below[: tile.size])
        picked = np.flatnonzero(np.logical_not(is_below[: tile.size], out=is_below[: tile.size]))
        after = count + len(picked)
        np.add(picked, start, out=indices[count:after], casting="unsafe")
        np.take(tile, picked, out=values[count:after])
        tile[picked] = 0
        count = after
    return count


def pick_lines(
    gradient_D: Floats,
    residual_D: Floats,
    rest_D: Floats,
    scale: float,
    threshold: float,
    lines: Places,
    values: Floats,
) -> int:
    """Adds two arrays, moves lines of 16 with much energy to a list, and writes the rest. A last line may be shorter.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        rest_D: From `aligned_zeros`; becomes the sum, 0 where picked.
        scale: A power of two, see `line_energy`.
        threshold: A line is picked unless its energy is below; so a line with a NaN is picked.
        lines: Becomes the numbers of the picked lines, ascending.
        values: 16 times as long; becomes their sums, 0 beyond the end.

    Returns:
        The number of picked lines, or `OVERFLOW` as in `pick_elements`.
    """
    count, limit = 0, np.float32(threshold)
    for start in range(0, gradient_D.size, TILE):
        if count + -(-min(TILE, gradient_D.size - start) // LINE) > len(lines):
            return OVERFLOW
        tile = rest_D[start : start + TILE]
        np.add(gradient_D[start : start + TILE], residual_D[start : start + TILE], out=tile)
        tile_L = as_lines(tile)
        picked = np.flatnonzero(~(line_energy(tile_L, np.float32(scale)) < limit))
        after = count + len(picked)
        np.add(picked, start // LINE, out=lines[count:after], casting="unsafe")
        values[count * LINE : after * LINE].reshape(-1, LINE)[...] = tile_L[picked]
        for line in picked:
            tile[line * LINE : (line + 1) * LINE] = 0
        count = after
    return count


def add_sample(gradient_D: Floats, residual_D: Floats, start: int, stride: int, sample_L: Floats) -> None:
    """Adds two arrays on a sample of lines.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        start: The first line.
        stride: Lines from one to the next.
        sample_L: float32 (L, 16); becomes the sums; all sampled lines are whole.
    """
    whole = gradient_D.size // LINE * LINE
    gradient_L, residual_L = gradient_D[:whole].reshape(-1, LINE), residual_D[:whole].reshape(-1, LINE)
    np.add(gradient_L[start::stride], residual_L[start::stride], out=sample_L)


def name_elements(lines: Places, indices_L: Places) -> None:
    """Writes the indices of all elements of some lines to ``indices_L``, uint32 (L, 16), in order."""
    np.multiply(lines[:, None], np.uint32(LINE), out=indices_L)
    np.add(indices_L, np.arange(LINE, dtype=np.uint32), out=indices_L)


def keep_lost(rest_D: Floats, indices_K: Places, values_K: Floats, seen_K: Floats) -> None:
    """Writes the rounding errors of the picked elements to the residual.

    Args:
        rest_D: Overwritten at the places.
        indices_K: The places, < D.
        values_K: What was picked.
        seen_K: What the receiver will decode.
    """
    rest_D[indices_K] = values_K - seen_K


def put_back(rest_D: Floats, places: Places, values: Floats, is_kept: Bools) -> int:
    """Puts some of the picked units back into the bucket; the others move to the front.

    Args:
        rest_D: Receives what lies within it.
        places: Numbers of the picked units; overwritten.
        values: float32 (U, unit), the values of those units; overwritten.
        is_kept: bool (U,).

    Returns:
        The number of units that are left, at the front of both arrays.
    """
    unit, left = values.shape[1], int(np.count_nonzero(is_kept))
    back = (places[~is_kept][:, None].astype(np.int64) * unit + np.arange(unit)).reshape(-1)
    is_within = back < rest_D.size
    rest_D[back[is_within]] = values[~is_kept].reshape(-1)[is_within]
    places[:left], values[:left] = places[is_kept], values[is_kept]
    return left


def gain_momentum(velocity_D: Floats, gradient_D: Floats, momentum: float, gained_D: Floats) -> None:
    """Computes a step of momentum, ``momentum · velocity + gradient``; rounds twice.

    Args:
        velocity_D: Unchanged.
        gradient_D: Unchanged.
        momentum: The factor.
        gained_D: From `aligned_zeros`, not one of the other two; overwritten.
    """
    np.multiply(velocity_D, np.float32(momentum), out=gained_D)
    np.add(gained_D, gradient_D, out=gained_D)


def gain_adam(
    first_D: Floats,
    second_D: Floats,
    gradient_D: Floats,
    coefficients: Floats,
    new_first_D: Floats,
    new_second_D: Floats,
    direction_D: Floats,
) -> None:
    """Computes a step of Adam's moments and its direction; rounds after every operation.

    Args:
        first_D: Unchanged.
        second_D: Unchanged.
        gradient_D: Unchanged.
        coefficients: See `_compress.correction.AdamCorrection.coefficients`.
        new_first_D: Overwritten.
        new_second_D: Overwritten.
        direction_D: Overwritten.
    """
    beta1, rest1, beta2, rest2, unbias1, unbias2, eps = coefficients
    scratch = np.empty(TILE, dtype=np.float32)
    for start in range(0, gradient_D.size, TILE):
        tile = slice(start, start + TILE)
        gradient, first, second, direction = gradient_D[tile], new_first_D[tile], new_second_D[tile], direction_D[tile]
        part = scratch[: gradient.size]
        np.multiply(first_D[tile], beta1, out=first)
        np.add(first, np.multiply(gradient, rest1, out=part), out=first)
        np.multiply(second_D[tile], beta2, out=second)
        np.multiply(np.multiply(gradient, gradient, out=part), rest2, out=part)
        np.add(second, part, out=second)
        np.multiply(np.sqrt(second, out=part), unbias2, out=part)
        np.add(part, eps, out=part)
        np.divide(np.multiply(first, unbias1, out=direction), part, out=direction)


def gain_second(
    second_D: Floats, gradient_D: Floats, coefficients: Floats, new_second_D: Floats, direction_D: Floats
) -> None:
    """Computes the bits of `gain_adam` for β₁ = 0, where no first moment is kept.

    Args:
        second_D: Unchanged.
        gradient_D: Unchanged.
        coefficients: As for `gain_adam`; those of the first moment are ignored.
        new_second_D: Overwritten.
        direction_D: Overwritten.
    """
    _, _, beta2, rest2, _, unbias2, eps = coefficients
    for start in range(0, gradient_D.size, TILE):
        tile = slice(start, start + TILE)
        gradient, second, direction = gradient_D[tile], new_second_D[tile], direction_D[tile]
        np.multiply(second_D[tile], beta2, out=second)
        np.multiply(np.multiply(gradient, gradient, out=direction), rest2, out=direction)
        np.add(second, direction, out=second)
        np.multiply(np.sqrt(second, out=direction), unbias2, out=direction)
        np.add(direction, eps, out=direction)
        np.divide(gradient, direction, out=direction)


def clear(array_D: Floats, indices_K: Places) -> None:
    """Writes 0 to some places.

    Args:
        array_D: Overwritten there.
        indices_K: The places, < D.
    """
    array_D[indices_K] = 0


def as_lines(array_D: Floats) -> Floats:
    """Returns the array as lines of 16, the last one padded with zeros; a view if nothing needs padding."""
    whole = array_D.size // LINE * LINE
    if whole == array_D.size:
        return array_D.reshape(-1, LINE)
    filled = np.zeros(whole + LINE, dtype=np.float32)
    filled[: array_D.size] = array_D
    return filled.reshape(-1, LINE)


def line_energy(lines_L: Floats, scale: np.float32) -> Floats:
    """Returns the sum of squares of each line after scaling. Adds halves, in the order of `lanes.add_line`.

    Args:
        lines_L: float32 (L, 16).
        scale: A power of two that brings the largest elements near 1. Squares of 1e-23 vanish and of 1e20 overflow, so
            without it a choice would depend on the loss's scale.

    Returns:
        float32 (L,).
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = lines_L * scale
        np.multiply(squares, squares, out=squares)
        width = LINE // 2
        while width:
            squares = squares[:, :width] + squares[:, width:]
            width //= 2
        return squares[:, 0]


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
