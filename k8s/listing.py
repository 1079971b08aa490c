"""ElasticJobs on a terminal: the columns are the server's, so `ls` and `kubectl get` say the same."""

from typing import Any

from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.resources import ELASTICJOBS
from elastic.proto.verbs import Output

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


async def show(api: Api, out: Output, namespace: str, *, name: str, selector: str) -> None:
    """One job, or all of a namespace, or (namespace empty) of all."""
    if out.form not in ("table", "wide"):
        if name:
            write(out, await api.get(ELASTICJOBS, namespace, name))
        else:
            _write_all(out, await api.all(ELASTICJOBS, namespace, selector=selector))
        return
    query = {"labelSelector": selector} if selector else {}
    path = ELASTICJOBS.path(namespace, name)
    table = await api.call("GET", path, query=query, accept=TABLE)
    shown = [
        (n, column["name"].upper())
        for n, column in enumerate(table["columnDefinitions"])
        if out.form == "wide" or not column.get("priority")
    ]
    rows = []
    for row in table.get("rows") or ():
        space = [] if namespace else [row["object"]["metadata"]["namespace"]]
        rows.append([*space, *(_cell(row["cells"][n]) for n, _ in shown)])
    if not rows:
        out.note(f"no ElasticJobs in {f'namespace {namespace}' if namespace else 'any namespace'}")
        return
    out.table([*([] if namespace else ["NAMESPACE"]), *(word for _, word in shown)], rows)


def full_name(item: Json) -> str:
    """As kubectl writes it."""
    return f"elasticjob.{ELASTICJOBS.group}/{item['metadata']['name']}"


def write(out: Output, item: Json) -> None:
    """An object as JSON, YAML, or its name."""
    item = _plain(item)
    if out.form == "name":
        out.text(full_name(item))
    elif out.form == "yaml":
        out.raw(_yaml(item))
    else:
        out.document(item)


def _write_all(out: Output, items: list[Json]) -> None:
    if out.form == "name":
        for item in items:
            out.text(full_name(item))
        return
    whole = {"apiVersion": "v1", "kind": "List", "items": [_plain(item) for item in items]}
    if out.form == "yaml":
        out.raw(_yaml(whole))
    else:
        out.document(whole)


def _plain(item: Json) -> Json:
    """Without the record of who manages which field, as kubectl shows it."""
    named: Json = {"apiVersion": ELASTICJOBS.api_version, "kind": ELASTICJOBS.kind, **item}
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    return {**named, "metadata": metadata}


def _yaml(value: Json) -> bytes:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode()


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
