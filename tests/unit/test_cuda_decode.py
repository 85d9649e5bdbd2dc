"""The CUDA path as far as it goes without a GPU: inputs, compilation, the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from feather_sglang.bench import calibrate
from feather_sglang.cli import main
from feather_sglang.kernels import cuda_decode

FILE = Path(cuda_decode.__file__)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_page_table_shares_the_pages_of_a_prefix_and_no_others():
    indptr, indices, last = cuda_decode.page_table([0, 1, 0], 50)
    assert indptr.tolist() == [0, 4, 8, 12] and last.tolist() == [2, 2, 2]
    first, second, third = (set(indices[a : a + 4].tolist()) for a in indptr[:-1].tolist())
    assert first == third and first | second == set(range(8))
    assert cuda_decode.page_table([0], 48).last_page_tokens.tolist() == [16]


def test_cells_and_sweep_are_those_of_calibrate():
    ours = [[(cell, prefixes) for cell, prefixes in cells] for cells in cuda_decode.grid()]
    assert ours == [[(vars(cell), cell.prefixes()) for cell in cells] for cells in calibrate.grid()]
    assert (cuda_decode.SWEEP_BYTES, cuda_decode.SWEEP_BATCH) == (calibrate.SWEEP_BYTES, calibrate.SWEEP_BATCH)


def test_the_pool_holds_the_largest_batch_beside_other_layers():
    token_bytes = 2 * 2 * cuda_decode.KV_HEADS * cuda_decode.HEAD_DIM
    largest = max(
        cell["distinct_prefixes"] * cell["prefix_tokens"] for cells in cuda_decode.grid() for cell, _ in cells
    )
    assert max(largest * token_bytes, cuda_decode.SWEEP_BYTES[-1]) + (1 << 30) <= cuda_decode.KV_POOL_BYTES


@pytest.mark.parametrize(("requests", "tokens"), [(1, 16), (1, 1024), (1, 16_384), (64, 16_384), (8, 4096)])
def test_splits_are_powers_of_two_of_at_least_two_tiles(requests, tokens):
    splits = cuda_decode.splits_for(requests, tokens, 132)
    assert splits.bit_count() == 1 and (splits == 1 or tokens / splits >= 2 * cuda_decode.TILE)
    enough = requests * cuda_decode.KV_HEADS * splits >= 4 * 132
    shorter = tokens / (2 * splits)
    assert enough or splits == 64 or shorter < 2 * cuda_decode.TILE


@without_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_a_gpu_the_kernel_is_compiled_and_one_line_says_so(dtype, tmp_path, capsys):
    assert main(["calibrate", "--device", "cuda", "--dtype", dtype, "--out", str(tmp_path / "profile.json")]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "no CUDA GPU was found" in err and "Triton kernel compiled" in err and "nothing was launched" in err
    assert not list(tmp_path.iterdir())


@without_gpu
def test_the_file_runs_by_itself(tmp_path):
    alone = tmp_path / "cuda_decode.py"
    alone.write_text(FILE.read_text())
    blocked = "import sys; sys.modules.update(dict.fromkeys(('feather_sglang', 'sglang', 'flashinfer'))); "
    run = "import runpy; sys.argv[0] = 'x'; runpy.run_path('cuda_decode.py', run_name='__main__')"
    for out, code, message in (("x.json", 1, "no CUDA GPU was found"), ("no/such/x.json", 2, "can't write")):
        done = subprocess.run(
            [sys.executable, "-c", blocked + run, "--out", out],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code and message in done.stderr and done.stderr.count("\n") == 1


INTERPRETED = """
import sys, torch
from feather_sglang.kernels import cuda_decode as c

torch.manual_seed(0)
for dtype, splits in ((torch.float16, 1), (torch.float16, 4)):
    # Lengths 1 to 240: shared pages, a short last page, stretches without tokens.
    pages = c.page_table([0, 1, 0, 2], 240)
    lengths = [240, 225, 231, 240]
    last = torch.tensor([n - 14 * 16 for n in lengths], dtype=torch.int32)
    indptr = torch.cat([pages.indptr, pages.indptr[-1:] + 1])
    indices = torch.cat([pages.indices, pages.indices[:1]])
    pages = c.Pages(indptr, indices, torch.cat([last, torch.ones(1, dtype=torch.int32)]))
    lengths.append(1)
    query = torch.randn(5, 8, 32).to(dtype)
    keys, values = (torch.randn(45, 16, 2, 32).to(dtype) for _ in range(2))
    out = c.TritonDecode(query, pages, splits)(keys, values)
    for r, n in enumerate(lengths):
        listed = indices[indptr[r] : indptr[r + 1]].long()
        for h in range(8):
            k, v = (x[listed].reshape(-1, 2, 32)[:n, h // 4].double() for x in (keys, values))
            expected = torch.softmax(k @ query[r, h].double() * 32**-0.5, 0) @ v
            error = (out[r, h].double() - expected).abs().max() / expected.abs().max()
            assert error < 4e-3, (dtype, splits, r, h, error)
"""


def test_triton_kernel_against_float64():
    """In the interpreter, on the CPU, which multiplies no bfloat16; the tolerance is a few roundings of float16."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
