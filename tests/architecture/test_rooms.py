"""The rooms stay apart: no circle of modules, and none of rooms."""

from __future__ import annotations

import pytest
from codebase import TOP, modules


def room_of(inner: str) -> str:
    """The folder of a module below the package, or the loose file that it is."""
    return inner.partition(".")[0]


@pytest.mark.parametrize("of_rooms", [False, True])
def test_no_circles(of_rooms: bool) -> None:
    """Imports inside functions and for types alone count: a circle put off is still a circle."""

    def name(inner: str) -> str:
        return room_of(inner) if of_rooms else inner

    graph: dict[str, set[str]] = {name(m.inner): set() for m in modules() if m.inner}
    for module in modules():
        # The package file hands out public names lazily, from every room.
        targets = {target[len(TOP) + 1 :] for target, _ in module.ours} - {""}
        if module.inner:
            here = name(module.inner)
            graph[here] |= {name(target) for target in targets} - {here}
    assert cycle(graph) == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a directed graph, as the names along it, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_a_cycle_would_be_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
