"""Whatever is in one job's status or spec: bounded memory, and plan() has an answer."""

import tracemalloc
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.core.actions import ApiFeedback
from ddpjob_operator.core.objects import json_read, observe, status
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.plan import plan
from support.world import START, World, check_status, crd_schema, job_object, running, started

Path = tuple[str, ...]
DIGITS = "9" * 5000
DEEP: Any = 7
for _ in range(900):
    DEEP = {"items": [DEEP]}
#: What some reader may take for a number, a range, a time or a name, or unfold.
HOSTILE: list[Any] = [
    ",".join(f"{10_001 * n}-{10_001 * n + 10_000}" for n in range(600)),
    "0-9999," * 5000, ",".join(f"{n}:1" for n in range(100_000)), f"0-{DIGITS}", f"{DIGITS}:2",
    DIGITS, f"-{DIGITS}", "x" * 1_000_000, "\u202e\x1b]52;" * 1000, "\n" * 100_000, "", "1e999",
    "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00Z", "9000-12-31T23:59:59Z",
    10**5000, -(10**5000), 2**63, 2**63 - 1, 2**31, 2**31 - 1, -1, 0, True,
    float("nan"), float("inf"), float("-inf"), 1e308, -0.5, None, [], {}, DEEP,
    ["9" * 9] * 50_000, [{}] * 50_000, {str(n): n for n in range(50_000)},
]  # fmt: skip
WHICH = st.sampled_from(range(len(HOSTILE)))


def fields(schema: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """The path of every field; that of a list's items has "[]", that of a map's values "{}"."""
    if path:
        yield path
    for name, part in schema.get("properties", {}).items():
        yield from fields(part, (*path, name))
    if "items" in schema:
        yield from fields(schema["items"], (*path, "[]"))
    if isinstance(more := schema.get("additionalProperties"), dict):
        yield from fields(more, (*path, "{}"))


def poison(holder: Any, path: Path, value: Any) -> Any:
    """The same with that value there, in every item of a list."""
    if not path:
        return value
    first, *rest = path
    if first == "[]":
        items = holder if isinstance(holder, list) and holder else [{}]
        return [poison(one, tuple(rest), value) for one in items]
    found = holder if isinstance(holder, dict) else {}
    keys = list(found) or ["productive"] if first == "{}" else [first]
    return {**found, **{key: poison(found.get(key), tuple(rest), value) for key in keys}}


STATUS = list(fields(crd_schema()["properties"]["status"]))
SPEC = [path for path in fields(crd_schema()["properties"]["spec"]) if path[0] != "template"]


@cache
def worlds() -> dict[str, World]:
    """One of each phase, whose fields are filled."""
    snapshot = {"path": "/s", "volume": {"hostPath": {"path": "/s"}}}
    fields: dict[str, Any] = {"standby": 1, "snapshot": snapshot, "suspend": False}
    full = running(**fields).poll(step=5, snapshotStep=4, stepsPerSecond=1.0, totalSteps=9)
    full = full.wait(3).end(1, 1).wait(2).run().poll(step=7, holds=True, serving="1:3").wait(60)
    spent = {"up": 60.0, "productive": 50.0}
    full.status["ledger"]["hub"] = {"attempt": 2, "startedAt": "2026-01-01T00:00:00Z"}
    full.status["ledger"]["hub"]["seconds"] = spent
    found = {
        "Starting": started(**fields),
        "Running": full,
        "Restarting": deepcopy(full).vanish(2),
        "Suspended": deepcopy(full).patch(suspend=True),
        "Failed": deepcopy(full).end(0, 2),
    }
    assert {name: world.phase for name, world in found.items() if name != "Restarting"} == {
        name: name for name in found if name != "Restarting"
    }
    return found


def peak(run: Any) -> float:
    """Return the most memory that was in use at a time of the call, in MiB."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.fault("U3")
@pytest.mark.parametrize("path", STATUS, ids=".".join)
def test_what_is_read_of_any_field_is_small_and_the_crd_would_take_it(path):
    found: list[dict[str, Any]] = []
    for value in HOSTILE:
        raw = poison(worlds()["Running"].status, path, value)
        assert peak(lambda raw=raw: found.append(status.to_dict(status.from_dict(raw, 3)))) < 1
        if found[-1] not in found[:-1]:
            check_status({"phase": "Running"} | found[-1])


@pytest.mark.fault("U3")
@given(
    phase=st.sampled_from(["Starting", "Running", "Restarting", "Suspended", "Failed"]),
    poisons=st.lists(st.tuples(st.sampled_from(STATUS), WHICH), min_size=1),
)
def test_whatever_is_in_the_status_the_planner_has_an_answer(phase, poisons):
    world = deepcopy(worlds()[phase])
    for path, value in poisons:
        world.job["status"] = poison(world.status, path, HOSTILE[value])
    assert peak(world.plan) < 4
    world.settle().restart_operator().wait(10_000)


@pytest.mark.parametrize("value", [None, 7, "x" * 10**6, [], [DEEP] * 100, DEEP, {"a": DEEP}])
def test_a_status_that_is_none_is_no_status(value):
    job = observe.job(job_object() | {"status": value})
    assert plan(job, (), ApiFeedback(), START).actions
    assert status.from_dict(value) == status.from_dict({})


@pytest.mark.parametrize("path", [p for p in SPEC if p[0] == "output"], ids=".".join)
def test_hostile_expressions_of_output_are_bounded(path):
    for value in HOSTILE:
        world = deepcopy(worlds()["Running"])
        world.job["spec"] = poison(world.job["spec"], path, value)
        job = observe.job(world.job)
        assert peak(lambda job=job: spec_.read(job.spec, "job")) < 1


@given(poisons=st.lists(st.tuples(st.sampled_from(SPEC), WHICH), min_size=1))
def test_whatever_is_in_the_spec_the_planner_has_an_answer(poisons):
    world = deepcopy(worlds()["Running"])
    for path, value in poisons:
        world.job["spec"] = poison(world.job["spec"], path, HOSTILE[value])
    world.job["metadata"]["generation"] += 1
    job = observe.job(world.job)
    assert peak(lambda: spec_.read(job.spec, "job")) < 1
    assert peak(world.plan) < 16


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-1,4", {0, 1, 4}), ("8-10", set()), ("9", {9}), (f"1,{DIGITS}", set()),
     ("3,1", set()), ("0-3,2-4", set()), ("5-3", set()), ("0-9," * 3000, set())],
)  # fmt: skip
def test_ranges_are_bounded_by_the_replicas_and_each_is_unfolded_once(text, found):
    assert json_read.parse_ranges(text, 10) == found


def test_all_that_the_operator_may_have_to_write_has_room():
    longest = json_read.format_ranges(frozenset(range(0, 10_000, 2)))
    assert json_read.parse_ranges(longest, 10_000) == frozenset(range(0, 10_000, 2))
    births = {10_000 + n % 64 if n < 64 else 9_000 + n: 999_999_998 for n in range(256)}
    assert json_read.parse_pairs(json_read.format_pairs(births)) == births
    check_status({"succeededReplicas": longest, "births": json_read.format_pairs(births)})


def test_every_text_list_and_map_of_the_status_has_a_bound_in_the_crd():
    bounds = {"string": ("maxLength", "enum", "format"), "array": ("maxItems",)}

    def unbounded(schema: dict[str, Any], path: str) -> Iterator[str]:
        wanted = bounds.get(schema.get("type", ""), ())
        if "additionalProperties" in schema:
            wanted = ("maxProperties",)
        if wanted and not any(name in schema for name in wanted):
            yield path
        for name, part in schema.get("properties", {}).items():
            yield from unbounded(part, f"{path}.{name}")
        if "items" in schema:
            yield from unbounded(schema["items"], f"{path}[]")

    assert list(unbounded(crd_schema()["properties"]["status"], "status")) == []
