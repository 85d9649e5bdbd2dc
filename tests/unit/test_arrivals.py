from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.arrivals import ArrivalOrder


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80))
def test_it_is_a_sorted_dictionary(script):
    order, model = ArrivalOrder(), {}
    for add, seq in script:
        if add and seq not in model:
            order.add(seq, f"r{seq}")
            model[seq] = f"r{seq}"
        elif not add:
            order.discard(seq)
            model.pop(seq, None)
        order._check()
        assert list(order) == [model[s] for s in sorted(model)] and len(order) == len(model)
        if model:
            assert order.first() == (min(model), model[min(model)])
    order.discard_all(list(model))
    assert not len(order)
