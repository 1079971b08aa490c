"""All that is tried on one device, in one process, since to import torch takes longer than the rest.

Each line of standard input names what to do next; each is answered by a line. It says `torch` by
itself, once that is imported. A step that hangs is known by the answer that does not come.
"""

import sys
from collections.abc import Mapping

from elastic.agent.probes.program import ask, begin, parser, tell


class Device:
    """What of it is there so far."""

    def __init__(self, name: str, level: str, group: Mapping[str, int | None] | None) -> None:
        """group: rank, world, port and listen of `collectives.Group`; None: it is alone."""
        self._name = name
        self._level = level
        self._meeting = group

    def torch(self) -> dict[str, float]:
        import torch

        from elastic.agent.probes import bandwidth, collectives, copies, matmul

        self._torch = torch
        self._probes = {p.__name__.rpartition(".")[2]: p for p in (matmul, bandwidth, copies)}
        self._collectives = collectives
        return {"threads": float(torch.get_num_threads())}

    def device(self) -> dict[str, float]:
        """A context on it, and the start of a meeting with its siblings."""
        self._device = self._probes["matmul"].use(self._name)
        one = self._torch.ones(1, device=self._device) + 1
        if self._meeting is not None:
            self._group = self._collectives.Group(self._device, **self._meeting)  # type: ignore[arg-type]
        return {"two": float(one)}

    def do(self, probe: str) -> dict[str, float]:
        """Raises Fault, NotKnown, and whatever a sick device raises."""
        if probe in ("torch", "device"):
            return getattr(self, probe)()  # type: ignore[no-any-return]
        if probe == "collectives":
            return self._group.measure(self._level)
        name = probe.removesuffix("_together")
        return self._probes[name].measure(self._device, self._level)  # type: ignore[no-any-return]


def main(argv: list[str]) -> None:
    arguments = parser("device", __doc__)
    arguments.add_argument("--device", default="cpu")
    for name in ("rank", "world", "port", "listen"):
        arguments.add_argument(f"--{name}", type=int)
    args = arguments.parse_args(argv)
    group = None if args.world is None else {
        "rank": args.rank, "world": args.world, "port": args.port, "listen": args.listen,
    }  # fmt: skip
    answers = begin(args.parent)
    device = Device(args.device, args.level, group)
    tell(answers, ask("torch", device.torch))
    for line in sys.stdin:
        probe = line.strip()
        tell(answers, ask(probe, lambda probe=probe: device.do(probe)))  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1:])
