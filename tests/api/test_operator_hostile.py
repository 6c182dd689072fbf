"""A user who may edit jobs writes what fits into the API server: nobody else notices."""

import functools
import json

from support.arena import Arena
from support.cluster import Cluster
from support.rest import Rest, eventually


def apply_deep(plane: Cluster, arena: Arena, name: str, value: str) -> None:
    """A job with a field of its pods that Kubernetes does not know; no client library writes it."""
    body = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "t"}], "x": 0}}},
    }
    text = json.dumps(body).replace('"x": 0', f'"x": {value}').encode()
    connection = Rest(plane.kubeconfig)._connection()  # a new one: none that was closed when idle
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    connection.request("POST", arena.job_path(), text, headers)
    answer = connection.getresponse()
    said = answer.read()
    assert answer.status == 201, said


def refusal(plane: Cluster, arena: Arena, name: str) -> str:
    """Asked of kubectl, for Python's own decoder gives up on such a job."""
    path = 'jsonpath={.status.conditions[?(@.type=="Invalid")].message}'
    return plane.kubectl("-n", arena.namespace, "get", "ddpjob", name, "-o", path).stdout


def test_jobs_that_are_nested_deep_hurt_nobody(control_plane, arena):
    apply_deep(control_plane, arena, "deep-before", "[" * 5000 + "]" * 5000)
    operator = arena.start_operator("--resync-seconds", "2")
    apply_deep(control_plane, arena, "deep-after", '{"a":' * 5000 + "1" + "}" * 5000)
    arena.apply("gang")
    arena.wait_phase("gang", "Running")
    for name in ("deep-before", "deep-after"):
        said = functools.partial(refusal, control_plane, arena, name)
        eventually(f"{name} is refused", lambda said=said: "nested too deep" in said())
    arena.quiet_resyncs()
    assert operator.process.poll() is None
    assert "Traceback" not in operator.log(), operator.log()
    assert "the watch of DDPJobs ended" not in operator.log()


def test_a_policy_that_was_changed_or_deleted_is_put_right(arena):
    arena.start_operator("--metrics-from", '[{"namespaceSelector": {"matchLabels": {}}}]')
    arena.apply("gang", restart={"backoff": {"maxSeconds": 1}})
    arena.wait_phase("gang", "Running", 1)
    path = arena.path("networkpolicies", "gang", "/apis/networking.k8s.io/v1")
    ours, events = arena.rest.get(path), arena.path("events")
    arena.kubelet.finish("gang-1", 1)
    arena.wait_phase("gang", "Running", 2)
    assert arena.rest.get(path) == ours, "there was nothing to write"
    opened = {"spec": {"ingress": [{}]}}
    changes = (lambda: arena.rest.merge(path, opened), lambda: arena.rest.delete(path))
    for attempt, change in enumerate(changes, 3):
        change()
        arena.kubelet.finish("gang-1", 1)
        arena.wait_phase("gang", "Running", attempt)
        assert arena.rest.get(path)["spec"] == ours["spec"]
    eventually("an event tells of it", lambda: "NetworkRepaired" in str(arena.rest.get(events)))
