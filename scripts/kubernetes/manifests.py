"""The chart as plain manifests, for `kubectl apply -k k8s/manifests`: `make crd` writes them."""

from pathlib import Path

import helm_python as helm
import yaml

K8S = Path(__file__).resolve().parents[2] / "k8s"
FILE = K8S / "manifests" / "operator.yaml"
NAMESPACE = "elastic-system"
HEAD = "# Made by `make crd` from k8s/chart. Its own namespace's jobs are looked after: set it in a kustomization.\n"


def text() -> str:
    values = {"crds": {"enabled": False}}
    files = helm.Chart.load(str(K8S / "chart")).render(values, name="elastic", namespace=NAMESPACE)
    found = [body for one in files.values() for body in yaml.safe_load_all(one) if body]
    for body in found:
        for meta in (
            body["metadata"],
            body.get("spec", {}).get("template", {}).get("metadata", {}),
        ):
            for label in ("managed-by", "version"):
                meta.get("labels", {}).pop(f"app.kubernetes.io/{label}", None)
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return HEAD + yaml.safe_dump_all([space, *found], sort_keys=False)


if __name__ == "__main__":
    FILE.write_text(text())
