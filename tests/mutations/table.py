"""The mutations: one decisive line each, made wrong in the way in which it is easily got wrong."""

from __future__ import annotations

from dataclasses import dataclass

CORE, SHELL = "operator/src/ddpjob_operator/core/", "operator/src/ddpjob_operator/shell/"
TRAINER = "trainer/src/ddpjob_trainer/"
SNAPSHOT = TRAINER + "snapshot/ondisk/"
STARTING, RESTARTING = CORE + "policy/starting/", CORE + "policy/restarting/"
CORE_TESTS, SHELL_TESTS = "tests/unit/operator_core/", "tests/unit/operator_shell/"
TRAINER_TESTS = "tests/unit/trainer/"


@dataclass(frozen=True, slots=True)
class Mutation:
    """``old``, which stands once in ``file``, becomes ``new``; a test of ``tests`` must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation("a node is given up on the word of a watch", RESTARTING + "fence.py",
             "_given_up(view, node) and _just_read(node)", "_given_up(view, node)",
             CORE_TESTS + "test_plan_nodes.py"),
    Mutation("a silence counts that the operator did not see", RESTARTING + "fence.py",
             "patience - min(node.down_seconds, watched)", "patience - node.down_seconds",
             CORE_TESTS + "test_plan_nodes.py"),
    Mutation("nodes are given up though most are silent", CORE + "objects/nodes.py",
             "return unready == workers or most", "return unready == workers",
             CORE_TESTS + "test_plan_nodes.py"),
    Mutation("pods are made beside pods of an older attempt", CORE + "plan.py",
             "return _confirmed(view) and not view.others and _due(view)", "return _due(view)",
             CORE_TESTS + "test_plan_restart.py"),
    Mutation("one restart fewer than maxRestarts", RESTARTING + "restart.py",
             "counted.charged > limits.max_restarts", "counted.charged >= limits.max_restarts",
             CORE_TESTS + "test_plan_restart.py"),
    Mutation("a failure of the start counts as the same again", RESTARTING + "restart.py",
             "or (loss.step or 0) <= view.snapshot_step", "",
             CORE_TESTS + "test_plan_repeat.py"),
    Mutation("a start that fails is given up within seconds", RESTARTING + "restart.py",
             "delay = max(delay, early)", "pass", CORE_TESTS + "test_plan_repeat.py"),
    Mutation("a program that ends with 0 when told to go has succeeded", CORE + "classify.py",
             "return ended and not pod.deleting", "return ended",
             CORE_TESTS + "test_plan_hostile.py"),
    Mutation("a probe that fails, and ends nothing, is the cause", RESTARTING + "probe.py",
             'if one.reason == "Killing"', "if one.reason", CORE_TESTS + "test_plan_probe.py"),
    Mutation("an end is judged before its pod's Events are read", RESTARTING + "root_cause.py",
             "if probe.reads(view):", "if False:", CORE_TESTS + "test_plan_probe.py"),
    Mutation("an attempt's number comes twice after a restore of etcd", CORE + "view.py",
             "return max([self.status.attempt, *believed]) + 1", "return self.status.attempt + 1",
             CORE_TESTS + "test_plan_hostile.py"),
    Mutation("suspend, edit, resume is taken for an edit if quick", STARTING + "template_guard.py",
             "unseen >= 2", "unseen >= 9", CORE_TESTS + "test_plan_template_guard.py"),
    Mutation("the barrier sees no older pod", SHELL + "executor.py",
             "p.attempt is not None and p.attempt >= status.floor(p.replica) for p in now.pods",
             "True for p in now.pods", SHELL_TESTS + "test_shell_executor.py"),
    Mutation("a gang is charged for its wait for a node", STARTING + "startup.py",
             "min(max(since, placed), since + patience) + patience", "since + patience",
             CORE_TESTS + "test_plan_release.py"),
    Mutation("the cause of a loss is waited for by a kubelet's clock", RESTARTING + "root_cause.py",
             "pod.told_at or pod.trainer.finished_at", "pod.trainer.finished_at",
             CORE_TESTS + "test_plan_restart.py"),
    Mutation("a job fails for good since a machine died", RESTARTING + "root_cause.py",
             "return None if restart.end(view, status, fence.failure(view, pod)) else pod",
             "return None", CORE_TESTS + "test_plan_root_cause.py"),
    Mutation("a suspension takes what had failed with it", CORE + "plan.py",
             "change, message = _broken(view, change, message)", "pass",
             CORE_TESTS + "test_plan_root_cause.py"),
    Mutation("peers pay for a pod that somebody has deleted", RESTARTING + "root_cause.py",
             "return gone[0] if gone else first", "return first",
             CORE_TESTS + "test_plan_root_cause.py"),
    Mutation("a copy of a pod hides a replica", CORE + "objects/observe.py",
             'return number if name == f"', 'return number if name or f"',
             CORE_TESTS + "test_plan_hostile.py"),
    Mutation("all pods of a large template are rendered at once", CORE + "plan.py",
             "_BATCH_BYTES // max(1, size)", "_BATCH_BYTES", CORE_TESTS + "test_plan_restart.py"),
    Mutation("a number of an attempt that no label holds is believed", CORE + "objects/status.py",
             "attempt if 0 <= attempt < MOST_ATTEMPTS else 0", "attempt",
             CORE_TESTS + "test_plan_hostile.py"),
    Mutation("a pod of another namespace is one of the gang", SHELL + "cache/store.py",
             "owner = (pod.namespace, pod.owner_uid) if",
             "owner = (self._keys.get(pod.owner_uid, (\"\",))[0], pod.owner_uid) if",
             SHELL_TESTS + "test_shell_store.py"),
    Mutation("calls that hang for one namespace's jobs hold all workers", SHELL + "workqueue.py",
             "not self._lines or len(self._working) + 1 >= self._workers", "not self._lines",
             SHELL_TESTS + "test_shell_workqueue.py"),
    Mutation("what no restart can cure is restarted in place", TRAINER + "launcher/hub/rounds.py",
             "cause is not None and cause.code in FINAL_EXIT_CODES", "False",
             TRAINER_TESTS + "test_rounds_decide.py"),
    Mutation("a GPU that failed is met again in place", TRAINER + "launcher/hub/rounds.py",
             "cause is not None and cause.code == ExitCode.HARDWARE", "False",
             TRAINER_TESTS + "test_rounds_decide.py"),
    Mutation("pods go back to the node of a GPU that failed", CORE + "plan.py",
             "avoided=node_avoidance.at_once(view)", "avoided=()",
             CORE_TESTS + "test_plan_hardware.py"),
    Mutation("who hands over gets no time to save", CORE + "plan.py",
             "late and not handover.saves(view, pod)", "late",
             CORE_TESTS + "test_plan_handover.py"),
    Mutation("a zombie's chain is followed", SNAPSHOT + "lineage.py",
             "key=lambda start: (start.attempt,", "key=lambda start: (-start.attempt,",
             TRAINER_TESTS + "test_trainer_snapshot_store.py"),
    Mutation("a file of a snapshot counts before it is durable", SNAPSHOT + "disk.py",
             "            os.fsync(fd)\n    except", "            pass\n    except",
             TRAINER_TESTS + "test_trainer_snapshot_store.py"),
    Mutation("a damaged file of a snapshot is loaded", TRAINER + "snapshot/restore/load.py",
             "if manifest.checksum(stream, file) != file.crc32:",
             "if manifest.checksum(stream, file) < 0:",
             TRAINER_TESTS + "test_trainer_snapshot_store.py"),
)  # fmt: skip
