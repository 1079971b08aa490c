"""A rank that calls a function: `python -m elastic.agent.call FOLDER LOCAL_RANK`.

Started by `elastic-run` for `elastic.launch`, which made FOLDER, readable by its user alone:

    main.json        what multiprocessing's spawn needs to import the main script again
    call             pickle of (function, arguments)
    <round>.<rank>   empty once the rank has begun, then the pickle of what the function returned
"""

import json
import os
import pickle  # noqa: TID251 - a function and its results: docs/security.md, elastic.launch
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import process, spawn
from pathlib import Path
from string import Template
from typing import Any

from elastic.proto import env

MAIN = "main.json"
CALL = "call"


def main(argv: list[str]) -> None:
    """Call the function and leave its result; what it raises, this raises."""
    folder, local_rank = Path(argv[0]), argv[1]
    variables = env.process_environment()
    result = folder / f"{variables[env.ROUND]}.{variables['RANK']}"
    result.touch()
    function, args = _load(folder)
    try:
        value = function(*(_substitute(arg, local_rank) for arg in args))
    except Exception as error:
        _record(error, variables.get("TORCHELASTIC_ERROR_FILE", ""))
        raise
    draft = result.with_suffix(result.suffix + ".part")
    draft.write_bytes(pickle.dumps(value))
    os.replace(draft, result)


def _load(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The main script is imported as `__mp_main__`, as multiprocessing's spawn does it."""
    current: Any = process.current_process()
    current._inheriting = True  # a main script that launches on import is told so
    try:
        spawn.prepare(json.loads((folder / MAIN).read_text()))
        function, args = pickle.loads((folder / CALL).read_bytes())
    finally:
        del current._inheriting
    return function, args


def _substitute(arg: Any, local_rank: str) -> Any:
    """torch's macro, in arguments that are text."""
    return Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg


def _record(error: Exception, path: str) -> None:
    """What torch's @record writes, which torch's launcher wraps every function in."""
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    told = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    Path(path).write_text(json.dumps({"message": told}))


if __name__ == "__main__":
    main(sys.argv[1:])
