"""Where a job's pod-seconds went: each once, whoever writes the status and whenever."""

import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from ddpjob_operator.core.objects import ledger as ledger_
from ddpjob_operator.core.objects import status as status_
from ddpjob_operator.core.objects.json_read import parse_time
from support.world import World, job_object, refusal, running, started

PODS = 3


def sums(world: World) -> dict[str, float]:
    found: dict[str, float] = world.status["ledger"]["podSeconds"]
    return found


def booked(world: World) -> float:
    """The time that the ledger is about."""
    found = world.status["ledger"]
    since, until = parse_time(found["since"]), parse_time(found["until"])
    assert since
    assert until
    return (until - since).total_seconds()


def hear(world: World, up: float, *, step: int = 0, **seconds: float) -> World:
    """The hub's launcher has run so long; the rest of ``up`` is a step under way."""
    hub = status_.from_dict(world.status).hub
    found = ledger_.read_account({"up": up, **seconds}, hub, world.now)
    world.feedback = replace(world.feedback, spent=found)
    return world.poll(step=step, totalSteps=1000, stepsPerSecond=2.0)


def at(world: World, seconds: float) -> World:
    world.now += timedelta(seconds=seconds)
    return world


def trained(**spec):
    """A gang that has run for 20 s, as its hub has said."""
    return hear(at(running(**spec), 20), up=20, warmup=5, productive=15)


def ended(world: World, replica: int, code: int, **spent: float) -> World:
    kind = "exit" if code else "success"
    words = {"version": 1, "kind": kind, "spent": spent} if spent else {"version": 1, "kind": "x"}
    return world.end(replica, code, message=json.dumps(words))


def scheduled(world: World, after: float, *seats: int, until: float) -> None:
    """These pods got their node so long after their creation, and their container after more."""
    for seat in seats:
        pod = world.pods[f"job-{seat}"]
        made = parse_time(pod["metadata"]["creationTimestamp"])
        assert made
        when = (made + timedelta(seconds=after)).isoformat()
        begun = (made + timedelta(seconds=until)).isoformat()
        pod["spec"]["nodeName"] = "node1"
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": when}],
            "containerStatuses": [
                {"name": "trainer", "state": {"running": {"startedAt": begun}}, "ready": True}
            ],
        }


def test_a_start_is_booked_by_the_times_in_the_pods():
    world = started()
    at(world, 60)
    scheduled(world, 0, 0, 1, until=20)
    scheduled(world, 50, 2, until=58)
    world.settle()
    assert world.phase == "Running"
    assert sums(world) == {"starting": 20 + 20 + 8, "warmup": 40 + 40 + 2, "waiting": 50}
    assert sum(sums(world).values()) == booked(world) * PODS == 180


def test_the_hubs_account_is_booked_exactly_once():
    world = running()
    at(world, 20)
    hear(world, up=20, warmup=8, productive=10)
    assert sums(world) == {"warmup": 24, "productive": 30}
    at(world, 15)
    hear(world, up=35, warmup=8, productive=20, data=4, snapshot=1, step=20)
    expected = {"warmup": 24, "productive": 60, "data": 12, "snapshot": 3}
    assert sums(world) == expected
    world.restart_operator()
    hear(world, up=35, warmup=8, productive=20, data=4, snapshot=1, step=20)
    at(world, 60)
    hear(world, up=95, warmup=8, productive=80, data=4, snapshot=1, step=99)
    assert sums(world) == {**expected, "productive": 240}
    assert sum(sums(world).values()) == booked(world) * PODS
    assert world.status["goodput"] == pytest.approx(240 / 279, abs=1e-4)
    told = Counter[str]()
    for one in world.booked:
        told[str(one.label)] += one.value  # type: ignore[assignment]
    assert told == sums(world), "the counters have the same"


def test_a_killed_process_costs_a_recovery_by_its_cause_and_steps_again():
    world = trained()
    ended_round = {"round": 0, "rank": 1, "code": 1, "kind": "exception", "exception": "X: y"}
    at(world, 10)
    hub = status_.from_dict(world.status).hub
    spent = {"up": 30, "warmup": 5, "productive": 17, "recovering": 5, "repeated": 2}
    heard = ledger_.read_account(spent, hub, world.now)
    world.feedback = replace(world.feedback, spent=heard)
    world.poll(ended_round, step=5)
    found = world.status["ledger"]
    assert found["podSeconds"] == {"warmup": 15, "productive": 51, "recovering": 15, "repeated": 6}
    assert found["recovering"] == {"User": 15}


def test_a_replacement_books_held_time_and_recovery_time():
    world = running(graceful=True)
    world.poll(holds=True)
    hear(at(world, 20), up=20, warmup=5, productive=15)
    world.poll(holds=True)
    at(world, 5).vanish(1)
    assert world.phase == "Starting"
    assert sums(world)["productive"] == 45, "the hub lives, and will tell"
    at(world, 7).run(1)
    hear(at(world, 10), up=42, warmup=5, productive=20, held=7, recovering=2, repeated=4, step=9)
    found = world.status["ledger"]
    lost = 7 + 3 * 2
    expected = {"warmup": 15, "productive": 60, "held": 14, "recovering": lost, "repeated": 12}
    assert found["podSeconds"] == expected
    assert found["recovering"] == {"Disruption": lost}


def test_a_lost_hub_is_believed_for_a_while_and_the_rest_is_not_known():
    world = trained()
    at(world, 12).vanish(0)
    assert sums(world) == {"warmup": 15, "productive": 45 + 36}
    world = trained()
    at(world, 50).vanish(0)
    assert sums(world) == {"warmup": 15, "productive": 45 + 60, "unknown": 90}
    assert sum(sums(world).values()) == booked(world) * PODS


def test_the_last_words_of_a_hub_are_exact_and_its_end_is_a_recovery():
    world = trained()
    at(world, 12)
    ended(world, 0, 1, up=30, warmup=5, productive=24, recovering=1)
    found = world.status["ledger"]
    assert found["podSeconds"] == {"warmup": 15, "productive": 72, "recovering": 3 + 6}
    assert found["recovering"] == {"User": 9}
    at(world, 10).run()
    hear(at(world, 8), up=8, warmup=6, productive=2, step=3)
    found = world.status["ledger"]
    assert found["podSeconds"]["recovering"] == 9 + 30 + 18
    assert found["recovering"] == {"User": 57}, "up to the first step of the next hub"
    assert sum(sums(world).values()) == booked(world) * PODS


def test_a_hang_is_none_of_the_time_that_training_took():
    world = running()
    hear(at(world, 20), up=20, warmup=5, productive=12)
    assert sums(world)["productive"] == 36, "a step of 3 s is under way"
    at(world, 300).end(1, 76)
    assert sums(world) == {"warmup": 15, "productive": 36, "recovering": 303 * PODS}
    assert world.status["ledger"]["recovering"] == {"Hang": 909}


def test_success_and_what_came_after_it():
    world = trained()
    at(world, 12)
    for replica in (1, 2):
        world.end(replica, 0)
    ended(world, 0, 0, up=30, warmup=5, productive=24, idle=1)
    assert world.phase == "Succeeded"
    assert sums(world) == {"warmup": 15, "productive": 72, "idle": 3 + 6}
    assert sum(sums(world).values()) == booked(world) * PODS
    before = world.status
    assert at(world, 500).settle().status == before, "it is closed"


def test_suspension_is_not_booked_once_its_pods_are_gone():
    world = trained(graceful=True)
    at(world, 4).patch(suspend=True)
    at(world, 6).finish_deletions()
    assert sums(world) == {"warmup": 15, "productive": 57, "snapshot": 18}
    at(world, 5000).patch(suspend=False)
    assert sum(sums(world).values()) == 30 * PODS
    at(world, 10).run()
    assert sums(world)["starting"] + sums(world)["warmup"] == 15 + 30


def test_a_program_without_a_launcher_of_ours_is_not_known():
    world = running()
    at(world, 100).end(1, 1)
    assert sums(world) == {"unknown": 300}
    assert world.status["goodput"] == 0


def test_waiting_for_a_quota_is_no_start_and_no_part_of_goodput():
    world = World(job_object())
    until = world.now + timedelta(seconds=600)
    quota = refusal(403, "exceeded quota: pods", "Forbidden")
    world.refuse = lambda _: quota if world.now < until else None
    world.settle()
    for _ in range(40):
        if world.pods:
            break
        world.wait(30)
    world.run()
    assert world.phase == "Running"
    found = sums(world)
    assert found["waiting"] > 0.9 * booked(world) * PODS
    assert sum(found.values()) == pytest.approx(booked(world) * PODS, abs=0.01)


def test_an_estimate_of_the_end_goes_on_with_what_failures_have_cost():
    world = running()
    hear(at(world, 100), up=100, warmup=20, productive=80, step=160)
    eta = world.status["eta"]
    assert eta["remaining"] == "7m", "840 steps at 2 per second; nothing has failed"
    round_ = {"round": 0, "rank": 1, "code": 1, "kind": "exit"}
    at(world, 100)
    hub = status_.from_dict(world.status).hub
    spent = {"up": 200, "warmup": 20, "productive": 120, "recovering": 30, "repeated": 30}
    world.feedback = replace(world.feedback, spent=ledger_.read_account(spent, hub, world.now))
    world.poll(round_, step=400, totalSteps=1000, stepsPerSecond=19.0)

    def left() -> float:
        ends = parse_time(world.status["eta"]["at"])
        assert ends
        return (ends - world.now).total_seconds()

    assert left() == 270, "400 steps took 120 s; a rate just after a restart says little"
    at(world, 60)
    spent |= {"up": 260, "productive": 180}
    world.feedback = replace(world.feedback, spent=ledger_.read_account(spent, hub, world.now))
    world.poll(round_, step=520, totalSteps=1000, stepsPerSecond=2.0)
    assert left() == 320
    world.all_wait("ImagePullBackOff")
    at(world, 60).poll(round_, step=521, totalSteps=1000, stepsPerSecond=2.0)
    world.end(1, 1)
    assert "eta" not in world.status


def test_what_a_stranger_has_written_breaks_no_sum():
    world = trained()
    world.job["status"] = {
        **world.status,
        "ledger": {
            **world.status["ledger"],
            "podSeconds": {"productive": -5, "data": "x", "snapshot": 1e300, "held": 7},
            "hub": {"attempt": -3, "startedAt": "never", "seconds": []},
        },
    }
    hear(at(world, 20), up=40, warmup=5, productive=35, step=7)
    found = sums(world)
    assert found["held"] == 7
    assert all(value >= 0 for value in found.values())
    assert sum(found.values()) - 7 <= 20 * PODS + 0.01


def test_a_ledger_costs_no_write_of_its_own():
    world = trained()
    at(world, 5)
    assert world.plan().actions == ()


def test_the_time_before_an_operator_kept_ledgers_is_in_none():
    world = running()
    at(world, 1000)
    world.job["status"] = {k: v for k, v in world.status.items() if k not in ("ledger", "goodput")}
    hear(world, up=1000, warmup=10, productive=980, step=1)
    assert sums(world) == {}
    hear(at(world, 70), up=1070, warmup=10, productive=1050, step=2)
    assert sums(world) == {"unknown": 60 * PODS}, "the first answer says where it stands"
    hear(at(world, 70), up=1140, warmup=10, productive=1119, data=1, step=3)
    assert sums(world) == {"unknown": 180, "productive": 207, "data": 3}
    assert sum(sums(world).values()) == booked(world) * PODS


def test_a_standby_is_idle_until_it_serves():
    world = running(standby=1)
    assert set(world.pods) == {f"job-{seat}" for seat in range(4)}
    hear(at(world, 20), up=20, warmup=5, productive=15)
    assert sums(world) == {"warmup": 15, "productive": 45, "idle": 20}


@pytest.mark.parametrize("up", [6e10, 9e10, 1e12, 1e300])
def test_no_word_of_a_launcher_overflows_a_time(up):
    world = running()
    hear(at(world, 20), up=up, productive=1.0)
    ended(at(world, 10), 1, 1, up=up, productive=1.0)
    assert world.status["attempt"] == 2, "its loss is acted on"


@pytest.mark.parametrize("rate", [-1.0, -1e-3, -1.6e-8, 0.0, 1e-300])
def test_no_rate_overflows_the_estimate(rate):
    world = running()
    hear(at(world, 20), up=20, productive=10)
    at(world, 100).poll(step=2, totalSteps=1000, stepsPerSecond=rate)
    assert "eta" not in world.status


def test_what_overlaps_is_booked_once_whatever_it_is():
    world = running()
    hear(at(world, 20), up=20, productive=10)
    hear(at(world, 20), up=40, productive=10, data=1e9, repeated=1e9, step=3)
    assert sum(sums(world).values()) <= booked(world) * PODS + 0.01


def test_a_pod_replaced_beside_a_launcher_that_keeps_no_account():
    world = running(graceful=True)
    world.poll(holds=True)
    at(world, 36000).poll(holds=True, step=2)
    at(world, 100).vanish(1)
    at(world, 7).run(1)
    assert sums(world)["unknown"] == 36100 * PODS
    assert sums(world)["held"] == 14


def test_a_recovery_that_takes_long_is_no_wait_for_room():
    world = trained(graceful=True)
    world.terminate(1)
    at(world, 1).end(2, 1)
    for _ in range(60):
        world.wait(10)
    assert world.stalled == "WaitingForDeletion"
    world.finish_deletions()
    at(world, 5).run()
    assert "waiting" not in sums(world)
    assert sums(world)["recovering"] > 600 * PODS


@pytest.mark.parametrize("spent", [{"warmup": 5}, {"unknown": 5}])
def test_a_hub_that_never_made_a_step_is_not_believed_to_have_trained(spent):
    world = running()
    hear(at(world, 5), up=5, **spent)
    at(world, 14).end(0, 137)
    assert "productive" not in sums(world)
    assert sum(sums(world).values()) == booked(world) * PODS


def test_pods_that_ended_while_no_operator_looked_are_not_booked_for_it():
    world = trained(graceful=True)
    at(world, 4).patch(suspend=True)
    world.pods.clear()
    at(world, 36000).restart_operator().sees_from_now().settle()
    assert sums(world)["snapshot"] <= 20 * PODS


def test_a_start_that_took_too_long_is_a_cause():
    world = started(startupDeadlineSeconds=60)
    for _ in range(20):
        world.wait(10)
        if world.status["attempt"] > 1:
            break
        world.all_wait("CreateContainerConfigError")
    world.run()
    hear(at(world, 5), up=5, warmup=5)
    assert world.loss["class"] == "Startup"
    assert status_.from_dict(world.status).ledger.recovering["Startup"] > 0


def test_counters_and_ledger_have_the_same_though_an_answer_moves_seconds():
    world = running()
    hear(at(world, 60), up=60, unknown=60)
    hear(at(world, 60), up=120, warmup=100, productive=20, step=2)
    assert sums(world) == {"warmup": 300, "productive": 60}
    assert sum(one.value for one in world.booked) == 360


def test_an_absurd_number_of_gpus_holds_up_no_write():
    limits = {"limits": {"nvidia.com/gpu": "9" * 5000}}
    container = {"name": "trainer", "image": "i", "resources": limits}
    world = running(nprocPerNode=1, template={"spec": {"containers": [container]}})
    hear(at(world, 20), up=20, productive=20)
    assert sums(world) == {"productive": 60}
    assert {one.name for one in world.booked} == {"pod_seconds_total"}
