"""The compiled loops in numpy, which define their results to the last bit: what tests compare the loops with.

Docstrings of the loops say what each does. A pass over a bucket takes a tile at a time here, too, so that a test may
give it less room. In the sparse optimizers' loops a line that lags is brought up to date as a whole.

Legend: D bucket · L lines of 16 · n given lines · F longest lag + 1 · K kept · W world.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shade.gradient._comm.message import MIDDLE, WIDE
from shade.gradient._kernels.lines import CHUNK, LINE, OVERFLOW, TILE, Places, as_lines
from shade.types import Bools, Floats, Indices


def pick_elements(
    gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, indices: Places, values: Floats
) -> int:
    """Adds two arrays, moves the large elements of the sum to a list, and writes the rest."""
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


def pick_chunks(
    gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, indices: Places, values: Floats
) -> int:
    """Adds two arrays, moves the largest elements of each chunk of the sum to a list, and writes the rest."""
    np.add(gradient_D, residual_D, out=rest_D)
    if not np.isfinite(rest_D).all():
        return OVERFLOW
    count = 0
    for start in range(0, rest_D.size, CHUNK):
        chunk = rest_D[start : start + CHUNK]
        wanted = math.ceil((start + chunk.size) * density) - math.ceil(start * density)
        picked = np.sort(np.argsort(-np.abs(chunk), kind="stable")[:wanted])
        picked = picked[chunk[picked] != 0]
        after = count + len(picked)
        indices[count:after], values[count:after] = start + picked, chunk[picked]
        chunk[picked] = 0
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
    """Adds two arrays, moves lines of 16 with much energy to a list, and writes the rest."""
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
    """Adds two arrays on a sample of lines."""
    whole = gradient_D.size // LINE * LINE
    gradient_L, residual_L = gradient_D[:whole].reshape(-1, LINE), residual_D[:whole].reshape(-1, LINE)
    np.add(gradient_L[start::stride], residual_L[start::stride], out=sample_L)


def name_elements(lines: Places, indices_L: Places) -> None:
    """Writes the indices of all elements of some lines to ``indices_L``, uint32 (L, 16), in order."""
    np.multiply(lines[:, None], np.uint32(LINE), out=indices_L)
    np.add(indices_L, np.arange(LINE, dtype=np.uint32), out=indices_L)


def keep_lost(rest_D: Floats, indices_K: Places, values_K: Floats, seen_K: Floats) -> None:
    """Writes the rounding errors of the picked elements to the residual."""
    rest_D[indices_K] = values_K - seen_K


def put_back(rest_D: Floats, places: Places, values: Floats, is_kept: Bools) -> int:
    """Puts some of the picked units back into the bucket; the others move to the front."""
    unit, left = values.shape[1], int(np.count_nonzero(is_kept))
    back = (places[~is_kept][:, None].astype(np.int64) * unit + np.arange(unit)).reshape(-1)
    is_within = back < rest_D.size
    rest_D[back[is_within]] = values[~is_kept].reshape(-1)[is_within]
    places[:left], values[:left] = places[is_kept], values[is_kept]
    return left


def gain_momentum(velocity_D: Floats, gradient_D: Floats, momentum: float, gained_D: Floats) -> None:
    """Computes a step of momentum, ``momentum · velocity + gradient``; rounds twice."""
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
    """Computes a step of Adam's moments and its direction; rounds after every operation."""
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
    """Computes the bits of `gain_adam` for β₁ = 0, where no first moment is kept."""
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
    """Writes 0 to some places."""
    array_D[indices_K] = 0


def line_energy(lines_L: Floats, scale: np.float32) -> Floats:
    """Returns the sum of squares of each line after scaling. Adds halves, in the order of `lanes.add_line`."""
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


def split(
    indices_K: Places, codes_K: npt.NDArray[np.uint8], middle_K: npt.NDArray[np.uint16], wide_K: Places
) -> tuple[int, int]:
    """Writes the gaps to three streams; returns the lengths of the second and third."""
    gaps_K = np.empty(len(indices_K), dtype=np.uint32)
    gaps_K[:1] = indices_K[:1]
    np.subtract(indices_K[1:], indices_K[:-1], out=gaps_K[1:])
    gaps_K[1:] -= 1
    np.minimum(gaps_K, MIDDLE, out=codes_K, casting="unsafe")
    escaped = gaps_K[gaps_K >= MIDDLE]
    codes_K[gaps_K >= 2**16] = WIDE
    middle, wide = escaped[escaped < 2**16], escaped[escaped >= 2**16]
    middle_K[: len(middle)] = middle
    wide_K[: len(wide)] = wide
    return len(middle), len(wide)


def join(codes_K: npt.NDArray[np.uint8], middle: npt.NDArray[np.uint16], wide: Places, indices_K: Places) -> int:
    """Adds the gaps up; returns the last index + 1."""
    gaps_K = codes_K.astype(np.uint64)
    gaps_K[codes_K == MIDDLE] = middle
    gaps_K[codes_K == WIDE] = wide
    after_K = np.cumsum(gaps_K + np.uint64(1))
    indices_K[:] = (after_K - np.uint64(1)).astype(np.uint32)
    return int(after_K[-1]) if len(after_K) else 0


def merge_parts(
    indices: npt.NDArray[np.uint32],
    values: Floats,
    ends_W: Indices,
    shares_W: Floats,
    size: int,
    merged: npt.NDArray[np.uint32],
    sums: Floats,
) -> int:
    """Adds all parts' values, times their shares, in the order of the parts."""
    del size
    places, inverse = np.unique(indices, return_inverse=True)
    counts_W = np.diff(ends_W, prepend=0)
    merged[: len(places)] = places
    sums[: len(places)] = 0
    np.add.at(sums, inverse, values * np.repeat(shares_W, counts_W))
    return len(places)
