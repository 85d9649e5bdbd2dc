from __future__ import annotations

from feather_sglang.scheduling.decode_meter import DecodeMeter


def test_decode_steps_count_once_the_prefill_is_behind_them():
    meter = DecodeMeter(settle=1)
    now = 0.0
    for prefill, running, lasts in (
        (True, 4, 10.0),  # the prefill
        (False, 4, 5.0),  # waits for its result
        (False, 4, 0.5),
        (False, 3, 0.25),
        (True, 3, 7.0),  # a chunk of a long prompt
        (False, 3, 3.0),
        (False, 3, 0.25),
    ):
        meter.begin(now)
        meter.end(prefill, running)
        now += lasts
    meter.begin(now)
    assert meter.take() == ((4 + 3 + 3) / (0.5 + 0.25 + 0.25), 0.5 + 0.25 + 0.25)
    assert meter.take() is None, "it begins anew"


def test_an_idle_server_has_no_throughput():
    meter = DecodeMeter(settle=0)
    meter.begin(0.0)
    meter.end(False, 0)
    meter.begin(9.0)
    assert meter.take() is None
