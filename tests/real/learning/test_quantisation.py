"""Formats against tables of their codes: the nearest of all representable values, found by trying every one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.errors import RealError
from real.learning.quantisation.groups import to_e4m3
from real.learning.quantisation.nvfp4 import to_e2m1
from real.learning.quantisation.rules import RULES, rule_named

Array = NDArray[np.float32]


def codes(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> NDArray[np.float64]:
    """Values of codes 0 .. count-1 of a sign-less small float, from the bits' meaning."""
    values = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
        fraction = mantissa / (1 << mantissa_bits)
        values.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    assert values[-1] < 2.0 ** (2**exponent_bits - bias)
    return np.array(values)


E4M3 = codes(4, 3, bias=7, count=127)  # code 127 is NaN
E2M1 = codes(2, 1, bias=1, count=8)


def nearest(values: Array, table: NDArray[np.float64]) -> Array:
    """By distance to every code; of two equally near ones the even code; beyond the last, the last."""
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - table)
    even_first = np.lexsort((np.arange(len(table)) % 2, np.zeros(len(table))))
    best = even_first[np.argmin(distance[..., even_first], axis=-1)]
    return np.asarray(np.copysign(table[best], values), np.float32)


def test_qm_06_the_tables_hold_the_formats_values() -> None:
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E4M3[:9].tolist() == [k / 512 for k in range(9)] and E4M3[-1] == 448
    assert len(E4M3) == 127 and E4M3[56] == 1.0


@pytest.mark.parametrize(("rounding", "table"), [(to_e4m3, E4M3), (to_e2m1, E2M1)])
def test_qm_06_rounding_finds_the_nearest_code(
    rounding: Callable[[Tensor], Tensor], table: NDArray[np.float64]
) -> None:
    """All values, all midpoints, the float32 neighbours of both, and a sample in between."""
    middle = (table[1:] + table[:-1]) / 2
    points = np.concatenate([table, middle]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    points = np.concatenate([points, np.random.default_rng(0).uniform(0, 1.2 * table[-1], 2000).astype(np.float32)])
    points = np.concatenate([points, -points, np.float32([1e9, -1e9])])
    assert np.array_equal(rounding(torch.from_numpy(points)).numpy(), nearest(points, table))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.01, 6), (7, 6), (-2.5, -2), (-9, -6)],
)
def test_qm_06_e2m1_ties_go_to_the_even_code_and_large_values_saturate(value: float, rounded: float) -> None:
    assert to_e2m1(torch.tensor([value])).item() == rounded


def blocks(weight: Array, rows: int, columns: int) -> list[tuple[slice, slice]]:
    return [
        (slice(r, r + rows), slice(c, c + columns))
        for r in range(0, weight.shape[0], rows)
        for c in range(0, weight.shape[1], columns)
    ]


def by_fp8(weight: Array) -> Array:
    out = np.zeros_like(weight)
    for at in blocks(weight, 128, 128):
        scale = np.float32(max(np.abs(weight[at]).max(), np.float32(1e-12))) / np.float32(448)
        out[at] = nearest(weight[at] / scale, E4M3) * scale
    return out


def by_mxfp8(weight: Array) -> Array:
    out = np.zeros_like(weight)
    for at in blocks(weight, 1, 32):
        largest, k = Fraction(float(np.abs(weight[at]).max())), -127
        while Fraction(2) ** k * 448 < largest:
            k += 1
        scale = np.float32(2.0**k)
        out[at] = nearest(weight[at] / scale, E4M3) * scale
    return out


def by_nvfp4(weight: Array) -> Array:
    out = np.zeros_like(weight)
    outer = np.float32(max(np.abs(weight).max(), np.float32(1e-12))) / np.float32(448 * 6)
    for at in blocks(weight, 1, 16):
        scale = nearest(np.array(np.abs(weight[at]).max() / np.float32(6) / outer), E4M3) * outer
        if scale > 0:
            out[at] = nearest(weight[at] / scale, E2M1) * scale
    return out


def by_integers(weight: Array, largest: int, columns: int) -> Array:
    out = np.zeros_like(weight)
    for at in blocks(weight, 1, columns):
        scale = np.float32(max(np.abs(weight[at]).max(), np.float32(1e-12))) / np.float32(largest)
        out[at] = nearest(weight[at] / scale, np.arange(largest + 1.0)) * scale
    return out


WRITTEN_OUT: dict[str, Callable[[Array], Array]] = {
    "fp8": by_fp8,
    "mxfp8": by_mxfp8,
    "nvfp4": by_nvfp4,
    "int8": lambda w: by_integers(w, 127, w.shape[1]),
    "int4": lambda w: by_integers(w, 7, 128),
    "int4_g32": lambda w: by_integers(w, 7, 32),
}


def weights(shape: tuple[int, int], seed: int) -> Array:
    """Magnitudes over many octaves, with zeros, a row of zeros and an outlier."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-14, 3, (shape[0], 1)) * (rng.random(shape) > 0.05)
    values[0] = 0
    values[-1, -1] = 90
    return values.astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 5), (2, 16), (130, 33), (129, 257)])
@pytest.mark.parametrize("rule", RULES)
def test_qm_06_a_rule_is_the_nearest_code_under_the_groups_scale(rule: str, shape: tuple[int, int]) -> None:
    assert set(WRITTEN_OUT) == set(RULES)
    plain = weights(shape, seed=sum(shape))
    assert torch.equal(RULES[rule].apply(torch.from_numpy(plain)), torch.from_numpy(WRITTEN_OUT[rule](plain)))
    half = torch.from_numpy(plain).bfloat16()
    got = RULES[rule].apply(half)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.from_numpy(WRITTEN_OUT[rule](half.float().numpy())).bfloat16())


@pytest.mark.parametrize("rule", RULES)
def test_qm_06_leading_dimensions_are_matrices_of_their_own(rule: str) -> None:
    stacked = torch.from_numpy(np.stack([weights((20, 40), seed) * 3.0**seed for seed in range(3)]))
    got = RULES[rule].apply(stacked)
    for matrix, alone in zip(got, stacked, strict=True):
        assert torch.equal(matrix, RULES[rule].apply(alone))


@pytest.mark.parametrize("rule", RULES)
def test_qm_06_zeros_stay_zeros_and_a_broken_weight_does_not_vanish(rule: str) -> None:
    assert torch.equal(RULES[rule].apply(torch.zeros(130, 40)), torch.zeros(130, 40))
    broken = torch.ones(2, 40)
    broken[1, 3] = float("nan")
    assert RULES[rule].apply(broken)[1, 3].isnan()


@pytest.mark.parametrize(
    ("largest", "scale"), [(448.0, 1.0), (448.00003, 2.0), (450.0, 2.0), (224.0, 0.5), (2.0**-140, 2.0**-127)]
)
def test_qm_06_mxfp8_scales_are_the_smallest_power_of_two_that_does_not_saturate(largest: float, scale: float) -> None:
    """Seen by a second value of 17 scales, a tie between 16 and 18 that goes to 16."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1] = largest, 17 * scale if largest > 1 else 0
    got = RULES["mxfp8"].apply(weight)[0]
    assert got[0] == torch.tensor(largest / scale).to(torch.float8_e4m3fn).float() * scale
    assert got[1] == (16 * scale if largest > 1 else 0)


def test_qm_06_nvfp4_blocks_saturate_where_their_scale_was_rounded_down_and_vanish_where_it_rounds_to_zero() -> None:
    """amax 2688 = 448 x 6 makes the outer scale 1. A block's 6.36 / 6 = 1.06 rounds to 1.0, so 6.36 becomes 6."""
    weight = torch.zeros(3, 16)
    weight[0, 0], weight[1, :3], weight[2, 0] = 2688, torch.tensor([6.36, -5.0, 0.25]), 6 * 2.0**-10
    got = RULES["nvfp4"].apply(weight)
    assert got[0, 0] == 2688 and got[1, :3].tolist() == [6, -4, 0]
    assert torch.equal(got[2], torch.zeros(16))  # half of E4M3's smallest value: a tie, to zero


@pytest.mark.parametrize("rule", ["mxfp8"])
def test_qm_06_scales_that_are_powers_of_two_make_quantising_twice_the_same_as_once(rule: str) -> None:
    once = RULES[rule].apply(torch.from_numpy(weights((40, 70), 1)))
    assert torch.equal(RULES[rule].apply(once), once)
    assert torch.equal(once.bfloat16().float(), once)  # and the values are BF16 values


@pytest.mark.parametrize("rule", RULES)
def test_qm_06_what_stacking_matrices_changes(rule: str) -> None:
    """Nothing for rules by rows, nor for aligned blocks of 128 rows; other blocks and NVFP4's outer scale mix parts."""
    q, k, small = (torch.from_numpy(weights((rows, 64), rows)) for rows in (256, 128, 8))
    apply = RULES[rule].apply

    def stacks(*parts: Tensor) -> bool:
        return torch.equal(apply(torch.cat(parts)), torch.cat([apply(p) for p in parts]))

    aligned, uneven = stacks(q, 1000 * k), stacks(1000 * small, small)
    assert (aligned, uneven) == {"fp8": (True, False), "nvfp4": (False, False)}.get(rule, (True, True))
    assert RULES[rule].by_row == uneven


BYTES = {
    "fp8": 256 * 320 + 4 * 2 * 3,
    "mxfp8": 256 * 320 + 256 * 10,
    "nvfp4": 256 * 160 + 256 * 20 + 4,
    "int8": 256 * 320 + 4 * 256,
    "int4": 256 * 160 + 4 * 256 * 3,
    "int4_g32": 256 * 160 + 4 * 256 * 10,
}


@pytest.mark.parametrize("rule", RULES)
def test_qm_09_bytes_as_stored(rule: str) -> None:
    assert RULES[rule].stored_bytes(256, 320) == BYTES[rule]


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(RealError, match="no rule 'fp6'; there are fp8, mxfp8, nvfp4, int8, int4, int4_g32"):
        rule_named("fp6")
