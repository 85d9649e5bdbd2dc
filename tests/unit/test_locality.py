"""What `bench locality` makes of what it measured; the measuring itself needs real servers."""

from __future__ import annotations

import pytest

from feather_sglang import cli
from feather_sglang.bench import batches


def test_groups():
    assert batches.groups(8, 1) == [0] * 8
    assert batches.groups(16, 8) == [*range(8), *range(8)]
    assert batches.groups(*batches.DIVERGENT) == [0] * 8 + [1]


def test_the_rate_counts_only_while_the_whole_batch_decodes():
    first = [(0.0, 1), (1.0, 2), (2.0, 5), (3.0, 9)]
    late = [(1.0, 1), (2.0, 3), (4.0, 9)]
    assert batches.decode_rate([first, late]) == ((9 - 2) + (3 - 1)) / (3.0 - 1.0)
    with pytest.raises(RuntimeError, match="never decoded as a whole"):
        batches.decode_rate([[(0.0, 1), (1.0, 2)], [(5.0, 1), (6.0, 2)]])


def test_the_table_says_what_the_rows_mean():
    rows = [batches.BatchRow(*kind, 100.0 * kind[0] / kind[1], (1.0, 2.0)) for kind in batches.BATCHES]
    rows.append(batches.BatchRow(*batches.DIVERGENT, 600.0, (1.0, 2.0)))
    text = batches.table(rows)
    assert "8 of one prefix beside 64 of eight: 1.00 times" in text
    assert "one divergent request more in a batch of 8: the step takes +50%" in text


def test_unknown_names_are_refused_with_the_valid_ones(capsys):
    assert cli.main(["bench", "locality", "--settings", "other"]) == 2
    assert "unknown setting 'other'; valid: main, longer-prefix, many-groups" in capsys.readouterr().err
    assert cli.main(["bench", "locality", "--policies", "fcfs,x"]) == 2
    assert "unknown policy 'x'; valid: " in capsys.readouterr().err
