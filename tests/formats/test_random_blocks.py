"""Random blocks: valid, of the wanted size, and the same from the same seed."""

import numpy as np
import pytest

from ggpy.formats import by_name
from ggpy.formats.random_blocks import random_blocks


@pytest.mark.parametrize("rms", [1.0, 0.02])
def test_weights_have_the_wanted_size(format, rms):
    blocks = random_blocks(format, 2000, np.random.default_rng(1), rms)
    weights = format.dequantize(blocks.view(np.uint8)).astype(np.float64)
    if format.scales(blocks).shape[1]:
        assert np.sqrt(np.mean(weights**2)) == pytest.approx(rms, rel=0.25)
    else:
        assert len(np.unique(weights)) > 200


def test_any_quants_occur(format):
    blocks = random_blocks(format, 2000, np.random.default_rng(2))
    for name in format.dtype.names or ():
        base = format.dtype[name].base
        if base.kind in "ui" and base.itemsize == 1 and blocks[name].size > 10000:
            assert len(np.unique(blocks[name])) == 256


def test_the_seed_decides(format):
    first, again, other = (
        random_blocks(format, 50, np.random.default_rng(seed)).tobytes() for seed in (3, 3, 4)
    )
    assert first == again != other


def test_no_blocks(format):
    assert len(random_blocks(format, 0, np.random.default_rng(5))) == 0


def test_derived_fields_agree():
    rng = np.random.default_rng(6)
    q8_1 = random_blocks(by_name("Q8_1"), 20, rng)
    sums = q8_1["d"].astype(np.float32) * q8_1["qs"].sum(axis=1)
    assert (q8_1["s"] == sums.astype(np.float16)).all()
    q8_K = random_blocks(by_name("Q8_K"), 20, rng)
    assert (q8_K["bsums"][:, 3] == q8_K["qs"][:, 48:64].sum(axis=1)).all()
