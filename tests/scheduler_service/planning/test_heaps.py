import heapq

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.planning.heaps import new_heaps, pop, push, replace_top, top_item, top_key

KEYS = st.integers(-5, 5) | st.integers(-(1 << 47), (1 << 47) - 1)
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "replace"]), st.integers(0, 1), KEYS, st.integers(0, 65_535))
)


@settings(deadline=None)
@given(STEPS)
def test_two_heaps_on_one_array_behave_like_two_of_the_standard_library(steps: list[tuple[str, int, int, int]]) -> None:
    heaps = new_heaps(np.array([len(steps), len(steps)]))
    models: list[list[tuple[int, int]]] = [[], []]
    for step, heap, key, item in steps:
        model = models[heap]
        if step == "push":
            push(heaps, heap, key, item)
            heapq.heappush(model, (key, item))
        elif model and step == "pop":
            assert pop(heaps, heap) == heapq.heappop(model)[1]
        elif model:
            replace_top(heaps, heap, key, item)
            heapq.heapreplace(model, (key, item))
        assert heaps.size[heap] == len(model)
        if model:
            assert (top_key(heaps, heap), top_item(heaps, heap)) == model[0]
