"""Keys, certificates and kubeconfigs of a cluster, made with openssl when they are missing."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from devcluster import host
from devcluster.layout import API_SERVICE_ADDRESS, Layout, Node

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


def ensure_cluster(layout: Layout) -> None:
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


def ensure_node(layout: Layout, node: Node) -> None:
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
