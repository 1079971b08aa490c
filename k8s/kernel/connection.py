"""Where the cluster is and who asks: a kubeconfig, or a pod's service account."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.k8s.kernel.errors import NoCluster

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its service account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What a client needs to know of a cluster."""

    configuration: Any
    """kubernetes.aio.client.Configuration: address, certificates, credentials."""
    namespace: str
    """Of the context or of the pod; `default` where neither says."""
    source: str
    """Where this was found, for messages: a kubeconfig's name, or words."""


async def find(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """The kubeconfig given, else the one of kubectl ($KUBECONFIG, ~/.kube/config), else the service
    account of the pod that this runs in; raises NoCluster."""
    # half a second and 46 MB: only where a cluster is talked to
    config = importlib.import_module("kubernetes.aio.config")
    named = kubeconfig or config.KUBE_CONFIG_DEFAULT_LOCATION or "~/.kube/config"
    if any(Path(name).expanduser().is_file() for name in named.split(":") if name):
        return await _from_file(config, named, context)
    if kubeconfig or context:
        raise NoCluster(f"there is no kubeconfig {named}: write where it is")
    return _from_account(config, named)


async def _from_file(config: Any, named: str, context: str | None) -> Connection:
    configuration = _configuration()
    try:
        loader = await config.load_kube_config(
            config_file=named,
            context=context,
            client_configuration=configuration,
            persist_config=False,
        )
        chosen = loader.current_context["context"]  # the one that is used: given, or the file's
    except Exception as error:  # the library lets through what a strange file makes it do
        raise NoCluster(f"kubeconfig {named} cannot be used: {error}") from error
    namespace = chosen.get("namespace") or "default"
    if not isinstance(namespace, str):
        raise NoCluster(f"kubeconfig {named} cannot be used: namespace {namespace} is no text")
    return Connection(configuration=configuration, namespace=namespace, source=named)


def _from_account(config: Any, named: str) -> Connection:
    configuration = _configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
        namespace = (ACCOUNT / "namespace").read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise NoCluster(
            f"no cluster is known: there is no kubeconfig {named}, and this is no pod with a "
            f"service account ({error})"
        ) from error
    return Connection(
        configuration=configuration, namespace=namespace, source="the pod's service account"
    )


def _configuration() -> Any:
    configuration = importlib.import_module("kubernetes.aio.client").Configuration()
    # Python 3.13 refuses authorities without extensions that many clusters' own lack; client-go
    # never asked for these.
    configuration.disable_strict_ssl_verification = True
    return configuration
