"""The store: newer replaces older, lists and deletions are not undone by late events."""

import gc
import json
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

from ddpjob_contract.crd import LABEL_ATTEMPT, LABEL_REPLICA
from ddpjob_operator.core.actions import ApiFeedback, QuorumRead
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.informer import PodInformer
from ddpjob_operator.shell.store import RewoundError, Store, slim_pod
from support import stored
from support.stored import Object, job

KEY = ("ns", "job")


def pod(version: int, uid: str = "p0", owner: str = "u1", phase: str = "Pending") -> Object:
    return stored.pod(uid, version=version, owner=owner, status={"phase": phase})


def store_with_a_job() -> Store:
    store = Store()
    store.put_job(job(5))
    return store


def test_of_a_template_no_objects_are_kept():
    container = {"name": "trainer", "env": [{"name": f"N{n}", "value": "v"} for n in range(50)]}
    volume = {"nfs": {"server": "s", "path": "p"}}
    spec = {
        "suspend": True,
        "template": {"spec": {"containers": [container]}},
        "snapshot": {"path": "/s", "volume": volume},
    }
    store = Store()
    store.put_job({**job(5), "spec": spec})
    seen: list[object] = [store.snapshot(KEY)]
    for found in seen:  # all that can be reached of it
        seen += [o for o in gc.get_referents(found) if not isinstance(o, type) and o not in seen]
    assert container not in seen
    assert volume not in seen


def test_names_of_fields_are_in_memory_once_for_all_jobs():
    text = json.dumps(
        {"spec": {"restart": {"policy": "Always"}}, "status": {"attempts": [{"n": 1}]}}
    )
    first, second = (observe.job({**job(5, uid=uid), **json.loads(text)}) for uid in "ab")

    def names(value: object) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(name for one in value.values() for name in names(one))]
        return [name for one in value for name in names(one)] if isinstance(value, list) else []

    for mine, yours in ((first.spec, second.spec), (first.status, second.status)):
        assert [id(one) for one in names(mine)] == [id(one) for one in names(yours)]


def phases(store: Store, uid: str = "u1") -> dict[str, str]:
    return {found.uid: found.phase for found in store.pods_of(uid)}


def test_a_job_made_again_under_the_same_name_starts_from_nothing():
    store = store_with_a_job()
    store.set_feedback("u1", ApiFeedback(network_attempt=3))
    store.put_pod(pod(6))
    assert store.put_job(job(9, uid="u2"))
    snapshot = store.snapshot(KEY)
    assert snapshot.feedback == ApiFeedback()
    assert snapshot.pods == ()
    assert store.feedback("u1") == ApiFeedback()


def test_the_answer_to_our_own_write_revives_no_job_that_is_gone():
    store = store_with_a_job()
    store.put_own_write(job(7, phase="Running"))
    snapshot = store.snapshot(KEY)
    assert snapshot.job.resource_version == "7"
    store.forget_job(KEY, "u1")
    store.put_own_write(job(8))
    assert store.snapshot(KEY) is None


def test_a_list_drops_jobs_that_vanished_but_none_younger_than_itself():
    store = store_with_a_job()
    store.put_job(job(3, uid="u2", name="old"))
    store.put_job(job(30, uid="u3", name="young"))
    assert store.drop_vanished_jobs(None, ["u1"], "20") == [("ns", "old")]
    assert sorted(store.keys_in(None)) == [("ns", "job"), ("ns", "young")]
    assert store.drop_vanished_jobs("elsewhere", [], "99") == []
    assert (store.keys_in("elsewhere"), len(store.keys_in("ns"))) == ([], 2)


def test_a_pod_event_names_the_job_and_an_echo_does_not():
    store = store_with_a_job()
    assert store.put_pod(pod(6)) == {KEY}
    assert store.put_pod(pod(6), from_watch=False) == set()
    assert store.put_pod(pod(5, phase="Running")) == set()
    assert phases(store) == {"p0": "Pending"}
    assert store.remove_pod("p0") == KEY
    assert store.remove_pod("p0") is None
    assert store.put_pod(pod(7, phase="Running")) == set(), "a late event brings nothing back"
    assert phases(store) == {}


def test_no_pod_is_of_another_namespaces_job():
    """Whoever learns a job's uid can write it on a pod of his own, and let that fail or stay."""
    liar = pod(6, "liar", phase="Failed")
    liar["metadata"].update(namespace="theirs", labels={LABEL_ATTEMPT: "1", LABEL_REPLICA: "1"})
    store = Store()
    assert store.put_pod(liar) == set(), "it may come before the job"
    store.put_job(job(5))
    assert store.put_pod(pod(7, "ours")) == {KEY}
    liar["metadata"]["resourceVersion"] = "8"
    assert store.put_pod(liar) == set()
    assert [each.uid for each in store.pods_of("u1")] == ["ours"]
    assert store.seen("u1", 1) == {0}


def test_a_list_of_the_liars_namespace_says_nothing_of_the_jobs_own_pods():
    """Each namespace is listed for itself, and pods may come before their jobs."""
    store = Store()
    liar = pod(3, "liar")
    liar["metadata"]["namespace"] = "theirs"
    store.put_pod(liar)
    store.put_pod(pod(4, "ours"))
    store.drop_vanished_pods("theirs", ["liar"], "9")
    store.put_job(job(10))
    assert [each.uid for each in store.pods_of("u1")] == ["ours"]


def test_a_pod_that_changed_its_owner_is_told_to_both():
    store = store_with_a_job()
    store.put_job(job(6, uid="u2", name="other"))
    store.put_pod(pod(7))
    assert store.put_pod(pod(8, owner="u2")) == {KEY, ("ns", "other")}
    assert store.put_pod(pod(7)) == set(), "a late event does not undo it"
    assert (phases(store), phases(store, "u2")) == ({}, {"p0": "Pending"})
    stripped = pod(9)
    stripped["metadata"]["ownerReferences"] = []
    assert store.put_pod(stripped) == {("ns", "other")}, "the former owner is told"
    assert (phases(store, "u2"), store.pod_count()) == ({}, 0)
    assert store.put_pod(pod(10)) == {KEY}, "given back, it counts again"


def test_a_quorum_list_replaces_the_cache_and_outlives_older_events():
    store = store_with_a_job()
    store.put_pod(pod(6, "gone"))
    store.put_pod(pod(7, "kept"))
    store.put_pod(pod(25, "young"))
    listed = [pod(19, "kept", phase="Running"), pod(18, "new")]
    store.replace_pods("u1", list(map(slim_pod, listed)), "20")
    assert phases(store) == {"kept": "Running", "new": "Pending", "young": "Pending"}
    assert store.put_pod(pod(12, "never-seen")) == set(), "history: gone again by 20"
    assert store.put_pod(pod(19, "kept", phase="Failed")) == set()
    assert store.put_pod(pod(21, "kept", phase="Failed")) == {KEY}
    broken = {**(whole := pod(22, "kept")), "metadata": {**whole["metadata"], "ownerReferences": 3}}
    assert store.put_pod(broken) == set()
    store.replace_pods("u1", list(map(slim_pod, [broken, pod(18, "new")])), "22")
    assert phases(store) == {"kept": "Failed", "new": "Pending", "young": "Pending"}


def test_a_relist_deletes_what_it_does_not_show_and_names_the_jobs():
    store = store_with_a_job()
    store.put_job(job(6, uid="u2", name="other"))
    store.put_job(job(6, uid="u3", name="quiet"))
    store.put_pod(pod(7, "a"))
    store.put_pod(pod(8, "b", owner="u2"))
    store.put_pod(pod(9, "c", owner="u3"))
    listed = [pod(8, "b", owner="u2", phase="Pending"), pod(9, "c", owner="u3")]
    changed = set[tuple[str, str]]().union(*map(store.put_pod, listed))
    changed |= store.drop_vanished_pods(None, ["b", "c"], "20")
    assert changed == {("ns", "job")}
    assert phases(store) == {}
    store.put_pod(pod(25, "made", owner="u2"), from_watch=False)
    assert store.drop_vanished_pods("elsewhere", [], "30") == set()
    store.drop_vanished_pods(None, ["b", "c"], "20")  # read before that was made
    assert phases(store, "u2") == {"b": "Pending", "made": "Pending"}


@pytest.mark.fault("A7")
def test_a_list_older_than_what_was_known_is_of_a_restored_etcd():
    store = store_with_a_job()
    store.put_pod(pod(30))
    with pytest.raises(RewoundError, match="pods were read at version 29 after 30"):
        store.check_list("pods", "29", store.newest("pods"))
    before = store.newest("ddpjobs")
    assert before == 5, "each kind may lie in an etcd of its own"
    store.put_job(job(9))
    store.check_list("ddpjobs", "7", before)  # an event has overtaken it
    store.check_list("ddpjobs", "9", store.newest("ddpjobs"))
    store.check_list("ddpjobs", "b", store.newest("ddpjobs"))


@pytest.mark.fault("A7")
def test_a_job_older_than_it_was_before_the_read_is_of_a_restored_etcd():
    """The manual's way raises the revision: lists are newer then, what they show is not."""
    store = store_with_a_job()
    store.put_job(job(9))
    before = store.job_versions()
    store.check_list("ddpjobs", "1000000000", store.newest("ddpjobs"))
    with pytest.raises(RewoundError, match="a DDPJob was read at version 7 after 9"):
        store.put_read_job(job(7), before)
    store.put_job(job(12))
    assert not store.put_read_job(job(11), before)  # an event has overtaken it


def test_who_had_a_pod_is_known_after_it_is_gone_for_the_newest_attempts():
    store = store_with_a_job()
    for attempt in range(1, 7):
        one = pod(10 + attempt, uid=f"x{attempt}")
        one["metadata"]["labels"][LABEL_ATTEMPT] = str(attempt)
        store.put_pod(one)
        store.remove_pod(f"x{attempt}")
    store.put_pod(pod(20, uid="kept"))  # of attempt 1: the others are replacements
    assert [len(store.seen("u1", attempt)) for attempt in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert store.seen("u1", None) == store.seen("other", 6) == frozenset()


def test_after_a_pause_in_leading_nothing_is_confirmed():
    store = store_with_a_job()
    read = QuorumRead(3, datetime(2026, 1, 1, tzinfo=UTC))
    store.set_feedback("u1", ApiFeedback(confirmed=read, network_attempt=3))
    store.doubt_all()
    assert store.feedback("u1") == ApiFeedback(network_attempt=3)


@pytest.mark.parametrize("seats", [frozenset[int](), frozenset({0})], ids=["all", "few"])
def test_a_pod_whose_deletion_overtakes_a_list_stays_gone(seats):
    store = store_with_a_job()
    store.put_pod(pod(6))
    store.put_pod(pod(19))  # being deleted: a list at 20 shows it so
    PodInformer(Mock(), store, None, Mock())._apply("DELETED", pod(21))
    store.replace_pods("u1", [slim_pod(pod(19))], "20", seats)
    assert phases(store) == {}
    store.replace_pods("u1", [slim_pod(pod(22))], "23", seats)
    assert phases(store) == {"p0": "Pending"}, "it only had no label for a while"


def test_a_list_of_few_seats_removes_and_outdates_their_pods_alone():
    def of(seat: int, version: int) -> Object:
        return stored.pod(f"p{seat}-{version}", seat, version=version)

    store = store_with_a_job()
    for seat in range(3):
        store.put_pod(of(seat, 6))
    store.replace_pods("u1", [slim_pod(of(2, 9))], "20", frozenset({1, 2}))
    assert sorted(phases(store)) == ["p0-6", "p2-9"]
    for seat in range(3):  # of a watch that is behind
        store.put_pod(of(seat, 15))
    assert sorted(phases(store)) == ["p0-15", "p0-6", "p2-9"]
    store.put_pod(of(1, 21))
    assert "p1-21" in phases(store)


def test_when_an_end_was_first_seen_is_kept_until_the_clock_is_set():
    times = iter([datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)])
    store = Store(lambda: next(times))
    store.put_job(job(5))

    def told(version: int, state: str) -> datetime | None:
        found = pod(version)
        found["status"]["containerStatuses"] = [{"name": "trainer", "state": {state: {}}}]
        store.put_pod(found)
        return store.pods_of("u1")[0].end_seen_at

    first = datetime(2026, 1, 1, tzinfo=UTC)
    seen = [told(6, "running"), told(7, "terminated"), told(8, "terminated")]
    assert seen == [None, first, first]
    store.forget_times()  # the clock was set
    assert store.pods_of("u1")[0].end_seen_at == datetime(2027, 1, 1, tzinfo=UTC)
