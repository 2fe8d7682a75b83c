"""Copies of plain data: what is copied, what is shared, what stays one."""

from covey.runtime.copies import PlainCopies


def copied(value):
    return PlainCopies().copy(value)


def test_containers_are_copied_all_the_way_down():
    value = {"a": [1, [2, {"b": {3}}]], "c": ([4], 5)}
    twin = copied(value)
    assert twin == value
    twin["a"][1][1]["b"].add(6)
    twin["a"].append(7)
    twin["c"][0].append(8)
    assert value == {"a": [1, [2, {"b": {3}}]], "c": ([4], 5)}


def test_what_is_one_stays_one_even_if_it_contains_itself():
    row = [["x"]]
    first, second = copied([row, row])
    assert first is second and first is not row
    knot = []
    knot.append(knot)
    twin = copied(knot)
    assert twin[0] is twin and twin is not knot


def test_other_objects_are_shared():
    class Strange(list):
        pass

    strange, thing = Strange([1]), object()
    twin = copied([strange, thing, range(3)])
    assert twin[0] is strange and twin[1] is thing
