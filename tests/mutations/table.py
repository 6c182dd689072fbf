"""The mutations: the line of each rule of the protocols, made wrong as it is easily got wrong.

Order of writes, barrier, who may be given up, budgets, O1 to O5, H and L, who is admitted,
durable snapshots, lineage. What is no rule of a protocol has its test and no row here.
"""

from __future__ import annotations

from dataclasses import dataclass

CORE, SHELL = "operator/src/ddpjob_operator/core/", "operator/src/ddpjob_operator/shell/"
TRAINER = "trainer/src/ddpjob_trainer/"
SNAPSHOT = TRAINER + "snapshot/ondisk/"
NODES, LOSS, CAPACITY, GANG = (CORE + part for part in ("nodes/", "loss/", "capacity/", "gang/"))
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
    Mutation("a node is given up on the word of a watch", NODES + "fence.py",
             " and _just_read(node)", "", CORE_TESTS + "test_plan_nodes.py"),
    Mutation("a control plane that was away is taken for dead nodes", NODES + "fence.py",
             "lease.unrenewed >= LEASE_PATIENCE and lease.behind >= LEASE_PERIOD",
             "lease.unrenewed >= LEASE_PATIENCE", CORE_TESTS + "test_plan_nodes.py"),
    Mutation("pods are made beside pods of an older attempt", GANG + "barrier.py",
             "_confirmed(view.seats) and not view.seats.others and _delays", "_delays",
             CORE_TESTS + "test_plan_restart.py"),
    Mutation("quota is given back while a pod has not ended", CORE + "seats.py",
             "return any(not pod.ended for pod in self.pods)", "return False",
             "tests/model/test_queue.py"),
    Mutation("one restart fewer than maxRestarts", LOSS + "verdict.py",
             "counted.charged > limits.max_restarts", "counted.charged >= limits.max_restarts",
             CORE_TESTS + "test_plan_restart.py"),
    Mutation("an attempt's number comes twice after a restore of etcd", CORE + "seats.py",
             "return max([self.status.attempt, *believed]) + 1", "return self.status.attempt + 1",
             CORE_TESTS + "test_plan_hostile.py"),
    Mutation("the barrier sees no older pod", SHELL + "executor.py",
             "p.attempt is not None and p.attempt >= status.min_attempt(p.replica)", "True",
             SHELL_TESTS + "test_shell_executor.py"),
    Mutation("a pod of another namespace is one of the gang", SHELL + "store.py",
             "owner = (pod.namespace, pod.owner_uid) if",
             "owner = (self._keys.get(pod.owner_uid, (\"\",))[0], pod.owner_uid) if",
             SHELL_TESTS + "test_shell_store.py"),
    Mutation("what no restart can cure is restarted in place", TRAINER + "launcher/hub/rounds.py",
             "cause is not None and cause.code in FINAL_EXIT_CODES", "False",
             TRAINER_TESTS + "test_rounds_decide.py"),
    Mutation("launchers that have not said so are taken to hold", GANG + "replacement.py",
             "able = view.status.can_wait_for_replacement and view", "able = view",
             CORE_TESTS + "test_plan_replace.py"),
    Mutation("a pod that is being removed is kept (O3)", GANG + "replacement.py",
             "if pod.deleting or evidence.failed(", "if evidence.failed(",
             CORE_TESTS + "test_plan_replace.py"),
    Mutation("a lost pod stays a member (O2)", GANG + "replacement.py",
             "{**status.min_attempt_by_seat, **dict.fromkeys(gone, attempt)}",
             "status.min_attempt_by_seat",
             CORE_TESTS + "test_plan_replace.py"),
    Mutation("a pod is made twice in one attempt (O5)", GANG + "replacement.py",
             "if read.begun if part else begun == status.attempt:", "if True:",
             CORE_TESTS + "test_plan_replace.py"),
    Mutation("seats that the cache misses are replaced with a lost one (E14)",
             LOSS + "cause.py", "if found is None or view.seats.need_read:",
             "if found is None:", CORE_TESTS + "test_plan_replace.py"),
    Mutation("who holds no longer is counted again (O2)", LOSS + "cause.py",
             "    if not has_waited(status, loss) or not _incident(status):\n", "    if True:\n",
             CORE_TESTS + "test_plan_replace.py"),
    Mutation("each further loss lets the others hold longer (O4)", CORE + "objects/status.py",
             "since = self.timings.replacing_since if self.replacing else None",
             "since = None", CORE_TESTS + "test_plan_replace.py"),
    Mutation("a launcher follows a hub that was replaced (L1)",
             TRAINER + "launcher/hub/membership.py",
             "return number >= self._least and (", "return bool(",
             TRAINER_TESTS + "test_following.py"),
    Mutation("a hub admits who does not know the secret (H1)", TRAINER + "launcher/hub/seats.py",
             "if not is_of_the_job(hello, mine.token):", "if False:",
             TRAINER_TESTS + "test_hub_server.py"),
    Mutation("a round begins before all have stopped (H2)", TRAINER + "launcher/hub/seats.py",
             "return everybody - self.stopped", "return set()",
             TRAINER_TESTS + "test_hub_phases.py"),
    Mutation("a round begins with a place empty (H2)", TRAINER + "launcher/hub/hub.py",
             "return _GangWaits(hub)", "pass",
             TRAINER_TESTS + "test_hub_phases.py"),
    Mutation("who was replaced comes back (H3)", TRAINER + "launcher/hub/seats.py",
             "if hello.pod in self._out or hello.birth < known.birth:", "if False:",
             TRAINER_TESTS + "test_hub_seats.py"),
    Mutation("a round begins before its checkpoint is known", TRAINER + "launcher/hub/hub.py",
             "return self  # asked again at the next tick", 'newest = ""',
             TRAINER_TESTS + "test_hub_phases.py"),
    Mutation("a zombie's chain is followed", SNAPSHOT + "lineage.py",
             "key=lambda start: (start.attempt,", "key=lambda start: (-start.attempt,",
             TRAINER_TESTS + "test_snapshot_start.py"),
    Mutation("a file of a snapshot counts before it is durable", SNAPSHOT + "disk.py",
             "            os.fsync(fd)\n    except", "            pass\n    except",
             TRAINER_TESTS + "test_snapshot_durable.py"),
    Mutation("a damaged file of a snapshot is loaded", TRAINER + "snapshot/restore/load.py",
             "if manifest.checksum(stream, file) != file.crc32:",
             "if manifest.checksum(stream, file) < 0:",
             TRAINER_TESTS + "test_snapshot_damage.py"),
    Mutation("a forged note in the store is taken", TRAINER + "comm/sealed.py",
             "len(content) < 4 or not hmac.compare_digest(mac, self._mac(name, content))",
             "len(content) < 4", TRAINER_TESTS + "test_sealed.py"),
    Mutation("one rank's note is taken for another's", TRAINER + "comm/sealed.py",
             "opened is None or opened[0] != rank", "opened is None",
             TRAINER_TESTS + "test_sealed.py"),
    Mutation("a note counts under any key of the store", TRAINER + "comm/sealed.py",
             'name.encode() + b"\\0" + content', "content", TRAINER_TESTS + "test_sealed.py"),
    Mutation("what a stranger may have written ends a job for good", TRAINER + "environment.py",
             "StoreKey(unknown, final=not env.get(contract.UID))", "StoreKey(unknown, final=True)",
             TRAINER_TESTS + "test_sealed.py"),
    Mutation("two resumed rounds that agree are a proof", TRAINER + "training/replay/replay.py",
             "if before := self._unproven:", "if before := None:",
             TRAINER_TESTS + "test_replay.py"),
)  # fmt: skip
