"""What the API server refuses for longer: one try at a time, ever more seldom, no two alike."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.capacity import refusals
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import ApiError
from support.world import START, World, job_object, refusal, running, started

DAY = 24 * 3600
DENIED = 'pods "job-0" is forbidden: violates PodSecurity "restricted:latest"'


def refusing(
    words: Callable[[], str] = lambda: DENIED, code: int = 403, what: str = "refuse"
) -> tuple[World, list]:
    """A world that refuses all pods, or their Service, and when it was asked for which."""
    world, asked = World(job_object()), []

    def no(asked_for: act.CreatePod | act.Body) -> ApiError:
        asked.append((world.now, getattr(asked_for, "replica", None)))
        return refusal(code, words(), "Forbidden")

    setattr(world, what, no)
    return world.settle(), asked


def live(world: World, seconds: float) -> World:
    """Look when the planner asks to be asked, for so long."""
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        wait = world.plan().requeue_after
        assert wait is not None
        world.wait(min(max(wait, 0.01), (end - world.now).total_seconds()))
    return world


@pytest.mark.parametrize("what", ["refuse", "refuse_network"])
@pytest.mark.parametrize("code", [403, 500, 0])
def test_after_a_refusal_one_object_is_tried_ever_more_seldom(code, what):
    world, asked = refusing(code=code, what=what)
    one = 0 if what == "refuse" else None
    assert [replica for _, replica in asked] == [one]
    del asked[:]
    live(world, 590)  # within the startup deadline
    assert {replica for _, replica in asked} == {one}
    assert 7 <= len(asked) <= 9, "about 2, 4, 8 ... 256"
    gaps = [(b - a).total_seconds() for (a, _), (b, _) in itertools.pairwise(asked)]
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps))
    del asked[:]
    world.edit().settle()  # a new generation is tried at once, one object first all the same
    assert [replica for _, replica in asked] == [one]


def test_other_words_begin_a_new_row_and_other_figures_do_not():
    said = [DENIED]
    world, _asked = refusing(lambda: said[0])
    live(world, 100)
    before = refusals.row(world.feedback)
    assert before
    said[0] = DENIED.replace("job-0", "job-17")
    live(world, 100)
    assert refusals.row(world.feedback).count > before.count
    said[0] = 'serviceaccount "trainer" not found'
    while "trainer" not in refusals.row(world.feedback).last.pattern:
        live(world, 1)
    assert refusals.row(world.feedback).count == 1


def test_a_quota_and_a_taken_name_hold_up_no_other_pod():
    denied = act.Refusal(1, 403, "Forbidden", DENIED, START)
    taken = observe.Existing("Pod", "job-0", "u2", 1, deleting=False)
    of_one = replace(denied, message="exceeded quota: q"), replace(denied, existing=taken)
    known = act.ApiFeedback(refused=(denied, *of_one))
    assert refusals.row(known) == refusals.Row(denied, 1)


def test_a_gang_in_backoff_names_the_last_refusal_and_the_next_try():
    world = World(job_object(startupDeadlineSeconds=DAY))
    denied = refusal(403, DENIED, "Forbidden")
    world.refuse = lambda action: denied if action.replica == 2 else None
    live(world.settle().run(0, 1), 700).end(0, 1)
    world.refuse = lambda _: None
    assert (world.phase, world.status["attempt"], world.pods) == ("Restarting", 2, {})
    assert world.stalled == "Forbidden", "the word of before holds at first"
    live(world, 20)
    told = world.condition("Stalled")
    assert world.stalled == "CreationFailed"
    assert 'violates PodSecurity "restricted:latest"' in told["message"]
    until = re.fullmatch(r".*, tried again at (\d\d:\d\d:\d\d) UTC", told["message"])
    assert until
    while world.phase == "Restarting":
        assert f"{world.now:%H:%M:%S}" <= until[1]
        assert world.condition("Stalled") == told
        live(world, 1)
    assert world.run().stalled == ""


def test_an_attempt_begun_by_another_operator_names_our_backoff():
    world, _ = refusing()
    world.job["spec"]["startupDeadlineSeconds"] = DAY
    live(world, 1500)
    begun = {"attemptStartedAt": f"{world.now:%Y-%m-%dT%H:%M:%SZ}"}
    status = world.job["status"]
    status |= {"attempt": 2, "membersSince": 2, "timings": {**status["timings"], **begun}}
    live(world, 60)
    assert (world.phase, world.stalled) == ("Starting", "CreationFailed")


def test_a_short_start_deadline_does_not_pass_during_a_backoff():
    world, _ = refusing()
    world.job["spec"]["startupDeadlineSeconds"] = 60
    live(world, 3600)
    told = [e for e in world.events if e.reason != "Started"]
    assert {e.reason for e in told} == {"Forbidden"}
    assert len(told) == 1 + world.status["restarts"]["released"], "once, and at each release"
    world.refuse = lambda _: None
    assert live(world, 600).run().phase == "Running"


def test_a_name_that_is_taken_for_long_is_asked_for_more_seldom():
    world = World(job_object(startupDeadlineSeconds=DAY))
    world.occupy("pods", "job-0", owner="DDPJob job").settle()
    for seconds, times in ((20, 10), (3600, 0), (3600, 120)):
        before = world.tries("pods", "job-0")
        live(world, seconds)
        assert not times or world.tries("pods", "job-0") - before == times


@pytest.mark.fault("N10")
def test_a_dead_node_that_holds_old_pods_is_named_with_the_cure():
    """Its advice is told once the pod has outlived its grace period: before, it ends as it may."""
    world = World(job_object())
    world.occupy("pods", "job-0", owner="DDPJob job", node="dead")
    until = world.now + timedelta(seconds=30)
    world.pods["job-0"]["metadata"]["deletionTimestamp"] = until.isoformat()
    told = live(world.settle(), 45).condition("Stalled")
    assert "Pod job-0 of an earlier attempt or job is still there on node dead" in told["message"]
    assert "taint" not in told["message"]
    told = live(world, 60).condition("Stalled")
    assert (
        "if it is off for good: kubectl delete node dead, or: kubectl taint node dead "
        in told["message"]
    )
    assert len(world.told("WaitingForDeletion")) == 2


def test_a_pod_of_ours_that_ends_slowly_is_no_reason_to_taint_its_node():
    world = running(graceful=True).end(0, 1)
    until = world.now + timedelta(seconds=60)
    del world.pods["job-0"]
    for pod in world.pods.values():
        pod["metadata"]["deletionTimestamp"] = until.isoformat()
    told = live(world, 70).condition("Stalled")
    assert (told["reason"], "taint" in told["message"]) == ("WaitingForDeletion", False)
    told = live(world, 10).condition("Stalled")
    assert "kubectl taint node node" in told["message"]


@pytest.mark.parametrize(
    ("message", "who", "cure"),
    [
        (DENIED, "the namespace's Pod Security level", "set what it names in the template"),
        (
            'pods "job-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1',
            "a ResourceQuota", "the operator tries again",
        ),
        (
            'pods "job-0" is forbidden: error looking up service account t/a: not found',
            "the API server", "create that ServiceAccount",
        ),
        (
            'pods is forbidden: User "system:serviceaccount:o" cannot create resource "pods" in t',
            "the operator's own account", "`namespaces`",
        ),
        (
            'pods "job-0" is forbidden: maximum memory usage per Container is 1Gi, but it is 2Gi',
            "a LimitRange", "requests and limits",
        ),
        (
            'admission webhook "w.example" denied the request: no', "a webhook", "those who run it",
        ),
        (
            "pods \"job-0\" is forbidden: ValidatingAdmissionPolicy 'p' denied request",
            "an admission policy", "change what it names",
        ),
        (
            "policy 'p' with binding 'b' denied request: composited variable: no such key",
            "an admission policy", "change what it names",
        ),
        ("etcd: no", "", ""),
    ],
)  # fmt: skip
def test_a_refusal_says_who_refused_and_what_helps(message, who, cure):
    told = refusals.explained(act.Refusal(1, 403, "Forbidden", message, START))
    words, refused, last = told.partition(" (refused by ")
    assert words == message.removeprefix('pods "job-0" is forbidden: ')
    assert (bool(refused), who in last, cure in last) == (bool(who), True, True)


@pytest.mark.parametrize(
    ("code", "said", "begins", "also"),
    [
        (422, 'Pod "job-0" is invalid: {}', "spec.containers[0].resources.limits: Required value",
         "rejects pod job-0"),
        (400, 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: {}',
         'unknown field "spec.containers[0].imagePullPolcy"', "rejects pod job-0"),
        (403, 'pods "job-0" is forbidden: {}',
         "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2",
         "no pod was made, next try in"),
    ],
)  # fmt: skip
def test_the_column_of_kubectl_begins_with_what_matters(code, said, begins, also):
    world = World()
    world.refuse = lambda _: refusal(code, said.format(begins))
    assert world.settle().status["message"].startswith(begins)
    told = world.condition("Stalled" if code == 403 else "Invalid")["message"]
    assert also in told


@pytest.mark.parametrize(
    ("words", "column"), [('Back-off pulling image "example/train:nope"',) * 2, ("", "pod job-0:")]
)
def test_the_column_tells_an_image_before_its_pod(words, column):
    world = started().waiting(0, "ImagePullBackOff", words)
    assert world.status["message"] == column
    assert "pod job-0" in world.condition("Stalled")["message"]
