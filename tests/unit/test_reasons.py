"""reasons.md is the closed list of reasons: no word of the operator is missing or too much."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "operator/src/ddpjob_operator/core", ROOT / "contract/src/ddpjob_contract")
PAGE = ROOT / "docs/reference/reasons.md"
#: Words of the same shape there that are no reasons.
OTHERS = {
    *(
        "Always",
        "Auto",
        "Native",
        "Never",
        "Fence",
        "Wait",
        "Fail",
        "Restart",
        "RestartFree",
    ),  # values of the spec
    "Deadline",  # a class that the definition has, and that nothing writes
    *("DDPJob", "Pod", "Service", "NetworkPolicy", "PodGroup", "Secret"),  # kinds
    *("Complete", "Invalid", "Stalled", "Unsupported", "Suspended", "ResumeProven"),  # conditions
    *("Straggling", "Silent", "Apart"),
    *("Pending", "Starting", "Running", "Restarting", "Succeeded", "Failed"),  # phases
    *("Normal", "Warning"),  # types of Events
    *("DisruptionTarget", "PodScheduled", "Ready", "Completed", "Error", "ErrImagePull"),  # pods'
    *("Workload", "QuotaReserved", "Evicted", "Finished", "Requeued", "PodsReady"),  # of Kueue
    *("FailedToStart", "NoReservation", "NodeFailures", "Preempted", "WaitForStart"),
    *("WaitForRecovery", "Started", "Recovered", "Admitted"),
    *("Exists", "NoExecute", "FallbackToLogsOnError", "Memory", "Ingress", "None"),
    *("ClusterFirstWithHostNet", "Cause", "Cure"),  # fields
    *("True", "False", "TCP", "Opaque", "RANK", "PYTHONUNBUFFERED", "ExitCode", "Signal", "NotIn"),
}
#: Words of Kubernetes that the page explains and no source has to know.
KUBERNETES = {
    *("Forbidden", "InternalError", "Timeout", "TooManyRequests", "ServiceUnavailable"),
    *("PreemptionByScheduler", "DeletionByTaintManager", "EvictionByEvictionAPI"),
    *("DeletionByPodGC", "TerminationByKubelet", "SIGKILL", "SIGTERM"),
    *("OutOfcpu", "OutOfmemory", "UnexpectedAdmissionError", "NodeAffinity"),
}
_WORD = re.compile("[A-Z][A-Za-z0-9]+")


def words_of_the_source() -> set[str]:
    return {
        node.value
        for source in SOURCES
        for file in source.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _WORD.fullmatch(node.value)
    }


def words_of_the_page() -> set[str]:
    return {word for word in re.findall("`([^`]+)`", PAGE.read_text()) if _WORD.fullmatch(word)}


def test_each_reason_has_its_cause_and_cure_and_no_word_is_left_over():
    source, page = words_of_the_source(), words_of_the_page()
    missing = source - OTHERS - page
    assert not missing, "add it to docs/reference/reasons.md, or to OTHERS if it is no reason"
    assert page - source - KUBERNETES == set()
    assert OTHERS - source == set()
