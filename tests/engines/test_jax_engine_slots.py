"""The bookkeeping of slots, without a device."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from manus_jax.engines.slots import SlotTable, common_prefix, prefill_pieces

IDS = st.lists(st.integers(0, 2), max_size=12)


def filled(slot):
    """The slot after its prompt was filled, ready to decode."""
    slot.filled = len(slot.ids) - 1
    return slot


@given(IDS, IDS)
def test_common_prefix_is_the_longest(first, second):
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    assert common_prefix(first, second) == len(list(same))


def test_a_session_reuses_its_stream_and_prefills_only_new_ids():
    table = SlotTable(2, min_shared=4)
    slot = filled(table.admit("a", [1, 2, 3], "job"))
    slot.ids += [4, 5]
    slot.filled += 2
    table.finish(slot)
    assert table.admit("a", [1, 2, 3, 4, 5, 6, 7], "job") is slot
    assert (slot.filled, slot.missing) == (4, 2)
    table.finish(filled(slot))
    assert table.admit("a", [1, 2, 9], "job").filled == 2
    table.finish(filled(slot))
    assert table.admit("a", [1, 2], "job").filled == 1  # the last id is always decoded


def test_empty_slots_are_taken_first_then_the_longest_idle():
    table = SlotTable(2, min_shared=4)
    a, b = table.admit("a", [1], 1), table.admit("b", [2], 1)
    assert table.admit("c", [3], 1) is None
    table.finish(b)
    table.finish(a)
    assert table.admit("c", [3], 1) is a and table.evictions == 1
    table.release("b")
    assert table.admit("d", [4], 1) is b and table.evictions == 1


def test_two_jobs_of_one_session_run_side_by_side():
    table = SlotTable(2, min_shared=4)
    first, second = (table.admit("a", [1, n], n) for n in range(2))
    assert first is not second
    table.release("a")
    assert {s.session for s in table.slots} == {None} and len(table.busy) == 2


def test_a_later_job_waits_for_the_prefix_that_an_older_one_computes_and_copies_it():
    table = SlotTable(3, min_shared=4)
    leader, other, follower = (
        table.admit(name, ids, 1)
        for name, ids in (("a", [1] * 9), ("b", [2] * 9), ("c", [1] * 6 + [3] * 3))
    )
    assert [table.waits(s) for s in (leader, other, follower)] == [False, False, True]
    leader.filled = 5
    assert table.waits(follower) and table.copyable(follower) == (leader, 5)
    leader.filled = 8
    assert not table.waits(follower) and table.copyable(follower) == (leader, 6)
    follower.filled = 6
    assert not table.waits(follower) and table.copyable(follower) is None


def test_a_leader_that_is_gone_is_not_waited_for():
    table = SlotTable(2, min_shared=2)
    leader = table.admit("a", [1] * 9, 1)
    follower = table.admit("b", [1] * 9, 1)
    assert table.waits(follower)
    table.finish(leader)
    assert not table.waits(follower) and table.copyable(follower) is None
    filled(table.admit("a", [2] * 9, 1))
    assert not table.waits(follower) and table.copyable(follower) is None
    table.finish(follower)
    table.admit("b", [2] * 9, 1)
    assert table.copyable(follower) == (leader, 8)


def test_new_weights_empty_all_slots():
    table = SlotTable(2, min_shared=4)
    running, idle = (filled(table.admit(n, [1, 2, 3], n)) for n in "ab")
    table.finish(idle)
    table.invalidate()
    assert (running.filled, idle.filled) == (0, 0) and running.missing == 2


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_pieces_cover_the_missing_ids_in_order(lengths, rows, chunk):
    table = SlotTable(5, min_shared=100)
    slots = [table.admit(str(n), [n] * length, 1) for n, length in enumerate(lengths)]
    pieces = prefill_pieces(slots, rows, chunk)
    places = [(s.index, at) for s, start, stop in pieces for at in range(start, stop)]
    wanted = [(s.index, at) for s in slots for at in range(s.missing)]
    assert places == wanted[: len(places)]
    assert len(pieces) == rows or places == wanted
    assert all(stop - start <= chunk for _, start, stop in pieces)


def paged(pages, count=3, copies=1):
    return SlotTable(count, min_shared=100, copies=copies, pages=pages, page_length=4)


def test_a_job_gets_pages_for_its_prompt_and_budget_and_keeps_those_that_it_filled():
    table = paged(8)
    slot = filled(table.admit("a", [1] * 5, 1, budget=8))
    assert len(slot.pages) == 4 and table.free_pages == 4
    slot.ids += [2]
    slot.filled += 1
    table.finish(slot)
    assert len(slot.pages) == 2 and table.free_pages == 6
    kept = list(slot.pages)
    assert table.admit("a", [1] * 5 + [2] * 10, 1, budget=5) is slot
    assert slot.filled == 5 and slot.pages[:2] == kept and len(slot.pages) == 5


def test_jobs_wait_while_running_ones_have_the_pages_and_take_those_of_idle_sessions():
    table = paged(6)
    a = filled(table.admit("a", [1] * 8, 1))
    b = filled(table.admit("b", [2] * 8, 1))
    assert table.admit("c", [3] * 12, 1) is None
    table.finish(a)
    c = table.admit("c", [3] * 12, 1)
    assert c is not None and c is not a  # an empty slot, with pages that were a's
    assert a.session is None and a.filled == 0 and table.evictions == 1
    assert table.admit("a", [1] * 8, 1) is None
    table.finish(b)
    assert table.admit("a", [1] * 8, 1) is not None and table.evictions == 2


def test_new_weights_free_the_pages_of_idle_sessions_only():
    table = paged(6)
    running, idle = (filled(table.admit(n, [1] * 8, n)) for n in "ab")
    table.finish(idle)
    table.invalidate()
    assert (len(running.pages), len(idle.pages), table.free_pages) == (2, 0, 4)


def test_jobs_are_spread_over_the_copies_of_the_model_and_prefixes_stay_on_one():
    table = SlotTable(2, min_shared=2, copies=2)
    slots = [table.admit(str(n), [1] * 9, n) for n in range(4)]
    assert [s.copy for s in slots] == [0, 1, 0, 1]
    assert [table.waits(s) for s in slots] == [False, False, True, True]
    assert slots[2].leader is slots[0] and slots[3].leader is slots[1]
    table.finish(slots[1])
    assert table.admit("1", [1] * 12, 1) is slots[1]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(1, 20), st.integers(1, 10), st.booleans()),
        max_size=30,
    ),
    st.integers(1, 2),
)
def test_a_page_belongs_to_one_slot_and_the_oldest_job_is_always_served(jobs, copies):
    table, pages = paged(8, copies=copies), 8 * copies
    for session, prompt, budget, finishes in jobs:
        slot = table.admit(session, [0] * prompt, "job", budget)
        if slot is None:
            assert table.busy  # nothing waits if nothing runs
        else:
            assert len(slot.pages) * 4 >= prompt + budget
            slot.filled = prompt - 1
        if finishes and table.busy:
            table.finish(table.busy[0])
        for copy in range(copies):
            held = [p for s in table.slots if s.copy == copy for p in s.pages]
            assert len(held) == len(set(held)) and set(held) <= set(range(8))
        assert table.free_pages + sum(len(s.pages) for s in table.slots) == pages
        assert all(len(s.pages) * 4 >= s.filled for s in table.slots)
