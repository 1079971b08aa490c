"""What `--notify` hands on to programs that are not ours: one JSON object, POSTed or on a command's stdin.

| field    | what it is                                                                                   |
|----------|----------------------------------------------------------------------------------------------|
| time     | seconds of Unix                                                                              |
| run_id   | the job's                                                                                    |
| kind     | kept_out, slow, replicas_differ, hang, node_lost, failure, or job_succeeded, job_failed,     |
|          | job_drained, job_stopped                                                                     |
| reason   | one line                                                                                     |
| nodes    | names, as far as there are some to blame                                                     |
| ranks    | numbers, the same                                                                            |
| detail   | of a round that ended, what `elasticctl why -o json` says; of the job's end, outcome and code |

A command has kind, reason and run_id in its environment, too.
"""

from collections.abc import Mapping
from typing import Any

_VARIABLES = {"ELASTIC_KIND": "kind", "ELASTIC_REASON": "reason", "ELASTIC_RUN_ID": "run_id"}


def variables(document: Mapping[str, Any]) -> dict[str, str]:
    """Of a command's environment."""
    return {name: str(document[key]).replace("\0", " ") for name, key in _VARIABLES.items()}


def is_url(target: str) -> bool:
    """Else it is a shell command."""
    return target.lower().startswith(("http://", "https://"))
