"""Files of the components: configuration from the layout; keys and kubeconfigs, with openssl.

Kubernetes reads YAML, of which JSON is a part, so its files are rendered as JSON.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from devcluster import host
from devcluster.layout import API_SERVICE_ADDRESS, CLUSTER_DOMAIN, SERVICE_NETWORK, Layout, Node

PAUSE_IMAGE = "docker.io/devcluster/busybox:1"


def etcd(layout: Layout) -> list[str]:
    """Return the arguments of etcd; its data may be lost with power."""
    peer = f"http://{layout.loopback}:2380"
    return [
        f"--data-dir={layout.state}/etcd",
        f"--listen-client-urls={layout.etcd}",
        f"--advertise-client-urls={layout.etcd}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(layout: Layout) -> list[str]:
    """Return the arguments of kube-apiserver."""
    pki = layout.pki
    return [
        f"--etcd-servers={layout.etcd}",
        f"--bind-address={layout.gateway}",
        f"--advertise-address={layout.gateway}",
        "--secure-port=6443",
        f"--cert-dir={layout.state}/apiserver",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/service-account.pub",
        f"--service-account-signing-key-file={pki}/service-account.key",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        # The service network ends in the nodes: webhooks are reached at their pods' addresses.
        "--enable-aggregator-routing=true",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def controller_manager(layout: Layout, nodes: int) -> list[str]:
    """Return the arguments of kube-controller-manager.

    A silent node is NotReady after 20 s, not 50.
    Without ``nodes`` of ours Node objects are written by hand, which need not be quick.
    """
    grace = 20 if nodes else 900
    return [
        f"--kubeconfig={layout.state}/controller-manager.kubeconfig",
        f"--bind-address={layout.loopback}",
        f"--cert-dir={layout.state}/controller-manager",
        f"--service-account-private-key-file={layout.pki}/service-account.key",
        f"--root-ca-file={layout.pki}/ca.crt",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--allocate-node-cidrs=false",
        "--node-monitor-period=2s",
        f"--node-monitor-grace-period={grace}s",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        "--profiling=false",
    ]


def scheduler(layout: Layout) -> list[str]:
    """Return the arguments of kube-scheduler."""
    return [
        f"--kubeconfig={layout.state}/scheduler.kubeconfig",
        f"--bind-address={layout.loopback}",
        f"--cert-dir={layout.state}/scheduler",
        "--leader-elect=false",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        "--profiling=false",
    ]


def gang_scheduling(minor: int) -> tuple[list[str], list[str]]:
    """Return the arguments that turn PodGroups on: the API server's own, and those of all three.

    Alpha in 1.36; later ones serve them as beta, and know fewer gates.
    """
    api, gates = "v1beta1", ["GenericWorkload", "TopologyAwareWorkloadScheduling"]
    if minor == 36:
        api, gates = "v1alpha2", [*gates, "GangScheduling", "WorkloadAwarePreemption"]
    enabled = ",".join(f"{gate}=true" for gate in gates)
    # Else a gang that waits is tried again without a pause: a core for as long as it waits.
    given = f"--feature-gates={enabled},SchedulerPopFromBackoffQ=false"
    return [f"--runtime-config=scheduling.k8s.io/{api}=true"], [given]


def corefile(layout: Layout) -> str:
    """Return CoreDNS' Corefile: cluster names only, uncached, so new addresses show at once."""
    return f""".:53 {{
    bind {layout.gateway}
    errors
    health {layout.loopback}:8080
    ready {layout.loopback}:8181
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
        kubeconfig {layout.kubeconfig}
        ttl 1
    }}
}}
"""


def containerd(node: Node) -> str:
    """Return containerd.toml; its state is in the node's /run, which dies with the node."""
    return f"""version = 2
root = "{node.home}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing",
]

[grpc]
  address = "{node.containerd_socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{node.home}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def cni(node: Node) -> str:
    """Return the pod network, a bridge in the node; leases die with the pods."""
    plugin: dict[str, Any] = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni/leases",
            "ranges": [[{"subnet": node.pod_network}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]}, indent=1)


def kubelet(layout: Layout, node: Node) -> str:
    """Return KubeletConfiguration, for hosts with cgroup v1 or v2, with or without systemd."""
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{layout.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{layout.pki}/{node.name}.crt",
        "tlsPrivateKeyFile": f"{layout.pki}/{node.name}.key",
        "address": node.address,
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "clusterDNS": [layout.gateway],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": f"{node.home}/resolv.conf",
        "podLogsDir": "/var/log/pods",
        "volumePluginDir": f"{node.home}/volume-plugins",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        # Lowering a score needs CAP_SYS_RESOURCE, which a host in a container may not have.
        "oomScoreAdj": 0,
        "maxPods": 110,
        "serializeImagePulls": False,
        "registerWithTaints": [],
        "syncFrequency": "10s",
        # Tests kill a container again and again; up to five minutes of rest prove nothing.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": 20,
        # Images come by `load` only: a collected one could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
    }
    return json.dumps(config, indent=1)


def proxy(layout: Layout, node: Node) -> str:
    """Return KubeProxyConfiguration; it leaves the host's connection tracking limits alone."""
    config: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{layout.state}/proxy.kubeconfig"},
        "hostnameOverride": node.name,
        "clusterCIDR": layout.pod_network,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "oomScoreAdj": 0,
        "nftables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }
    return json.dumps(config, indent=1)


_DAYS = "3650"
_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
#: Client certificates: file name -> subject.
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "apiserver-kubelet": "/O=system:masters/CN=apiserver-kubelet",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
}


def ensure_certificates(layout: Layout) -> None:
    """Make the CA, the API server's and the clients' certificates and the kubeconfigs."""
    layout.pki.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = layout.pki / "ca.crt"
    if not authority.exists():
        key = layout.pki / "ca.key"
        _openssl("req", "-x509", *_KEY, "-keyout", key, "-out", f"{authority}.new",
                 "-subj", "/CN=devcluster-ca", "-days", _DAYS)  # fmt: skip
        Path(f"{authority}.new").rename(authority)
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names.append("kubernetes.default.svc.cluster.local")
    addresses = ["127.0.0.1", layout.gateway, layout.loopback, API_SERVICE_ADDRESS]
    _certificate(layout, "apiserver", "/CN=kube-apiserver", names, addresses)
    for name, subject in CLIENTS.items():
        _certificate(layout, name, subject)
    for name in ("admin", "controller-manager", "scheduler", "proxy"):
        _kubeconfig(layout, name)
    _service_account_keys(layout)


def ensure_node_certificates(layout: Layout, node: Node) -> None:
    """Make a node's certificate, for its kubelet as a client and as a server."""
    subject = f"/O=system:nodes/CN=system:node:{node.name}"
    _certificate(layout, node.name, subject, [node.name], [node.address])
    _kubeconfig(layout, node.name)


def _certificate(
    layout: Layout,
    name: str,
    subject: str,
    names: list[str] | None = None,
    addresses: list[str] | None = None,
) -> None:
    pki = layout.pki
    if (pki / f"{name}.crt").exists():
        return
    request, extensions, made = pki / f"{name}.csr", pki / f"{name}.ext", pki / f"{name}.new"
    _openssl("req", *_KEY, "-keyout", pki / f"{name}.key", "-out", request, "-subj", subject)
    alternatives = [f"DNS:{one}" for one in names or []] + [f"IP:{one}" for one in addresses or []]
    usage = "extendedKeyUsage=clientAuth,serverAuth\n"
    extensions.write_text(
        usage + (f"subjectAltName={','.join(alternatives)}\n" if alternatives else "")
    )
    _openssl("x509", "-req", "-in", request, "-CA", pki / "ca.crt", "-CAkey", pki / "ca.key",
             "-CAcreateserial", "-out", made, "-days", _DAYS, "-extfile", extensions)  # fmt: skip
    made.rename(pki / f"{name}.crt")
    request.unlink()
    extensions.unlink()


def _service_account_keys(layout: Layout) -> None:
    public = layout.pki / "service-account.pub"
    if public.exists():
        return
    private = layout.pki / "service-account.key"
    _openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", private)
    _openssl("pkey", "-in", private, "-pubout", "-out", f"{public}.new")
    Path(f"{public}.new").rename(public)


def _kubeconfig(layout: Layout, name: str) -> None:
    """Write a kubeconfig that holds its certificates, so that it can be copied elsewhere."""
    path = layout.state / f"{name}.kubeconfig"
    if path.exists():
        return

    def data(file: str) -> str:
        return base64.b64encode((layout.pki / file).read_bytes()).decode()

    authority = data("ca.crt")
    user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
    context = f"devcluster-{layout.name}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": context,
                "cluster": {"server": layout.server, "certificate-authority-data": authority},
            }
        ],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": name}}],
        "current-context": context,
    }
    aside = path.with_suffix(".new")
    aside.touch(mode=0o600)
    aside.write_text(json.dumps(config, indent=1))  # JSON is YAML
    aside.rename(path)


def _openssl(*arguments: str | Path) -> None:
    host.run(["openssl", *arguments], why="openssl")
