from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.arrivals import ArrivalOrder, Ticket


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=80), st.integers(0, 399))
def test_it_is_a_sorted_dictionary(script, many):
    order, model = ArrivalOrder(), {}
    tickets = [Ticket(f"r{seq}", seq, 0, 0.0, 0) for seq in range(401)]
    script = [*script, *((True, seq) for seq in range(many)), *((False, seq) for seq in range(many // 2, many))]
    for add, seq in [*script, *script]:
        if add and seq not in model:
            order.add(tickets[seq])
            model[seq] = tickets[seq]
        elif not add:
            order.discard(tickets[seq])
            model.pop(seq, None)
        assert len(order) == len(model)
        if model:
            assert order.first() is model[min(model)]
    order._check()
    assert list(order) == [model[s] for s in sorted(model)]


def test_entries_of_those_who_left_do_not_pile_up_behind_one_who_stays():
    order = ArrivalOrder()
    order.add(Ticket("stays", 0, 0, 0.0, 0))
    for seq in range(1, 10_000):
        ticket = Ticket(seq, seq, 0, 0.0, 0)
        order.add(ticket)
        order.discard(ticket)
    order._check()
    assert len(order._listed) < 100


def test_nobody_waits_twice_and_an_empty_order_has_no_first():
    order, ticket = ArrivalOrder(), Ticket("a", 0, 0, 0.0, 0)
    with pytest.raises(IndexError):
        order.first()
    order.add(ticket)
    with pytest.raises(ValueError, match="waits already"):
        order.add(ticket)
