"""Compare launchers by hand: `python -m tests.e2e.conformance --help` (from the checkout's root)."""

import argparse
import json
import sys
import time
from pathlib import Path

from .cases import CASES
from .differences import explained
from .launchers import ELASTIC_FORKED, ELASTIC_SPAWNED, TORCHRUN, TORCHRUN_WARM
from .normalise import compare, normalise
from .runner import run

PAIRS = {
    "self": (TORCHRUN, TORCHRUN),
    "self-warm": (TORCHRUN_WARM, TORCHRUN_WARM),
    "spawn": (TORCHRUN, ELASTIC_SPAWNED),
    "fork": (TORCHRUN_WARM, ELASTIC_FORKED),
}


def main() -> int:
    """Print what differs and no row explains; 0 if nothing does."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.conformance", description=__doc__)
    parser.add_argument("pair", choices=PAIRS, help="which two to compare")
    parser.add_argument("case", nargs="*", help="these cases only")
    parser.add_argument("--save", type=Path, help="folder for what each launcher did, as JSON")
    parser.add_argument("--all", action="store_true", help="also what a row explains")
    args = parser.parse_args()
    theirs, ours = PAIRS[args.pair]
    bad = 0
    for name in args.case or CASES:
        case = CASES[name]
        if theirs.warm is not None and not case.forks:
            continue
        started = time.monotonic()
        try:
            flats = [normalise(run(case, launcher)) for launcher in (theirs, ours)]
            deltas = compare(*flats)
        except AssertionError as error:
            sys.stdout.write(f"FAIL {name}: {error}\n")
            bad += 1
            continue
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
            for side, flat in zip(("theirs", "ours"), flats, strict=True):
                path = args.save / f"{name}.{side}.json"
                path.write_text(json.dumps(flat, indent=1, sort_keys=True))
        rows = [(delta, explained(name, delta, theirs.warm is not None)) for delta in deltas]
        unexplained = [delta for delta, row in rows if row is None]
        bad += bool(unexplained)
        word = "FAIL" if unexplained else "ok"
        preloaded = [value for key, value in flats[1].items() if key.endswith(".torch_preloaded")]
        if args.pair == "fork" and not all(preloaded):
            word += " (ranks were spawned)"
        sys.stdout.write(f"{word} {name} ({time.monotonic() - started:.1f} s)\n")
        for delta, row in rows:
            if args.all or row is None:
                sys.stdout.write(f"  {row.id if row else '?'}: {delta}\n")
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
