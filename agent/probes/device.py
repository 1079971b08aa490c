"""All that is tried on one device, in one process, since to import torch takes longer than the rest.

Each line of standard input names what to do next; each is answered by a line, but for the first one, `context`: from now on
it may be on the device. It says `torch` by itself, once that is imported. A step that hangs is known by the answer that
does not come.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from elastic.agent.probes.answers import CONTEXT
from elastic.agent.probes.program import Clock, NotKnown, ask, begin, parser, tell


class Device:
    """What of it is there so far."""

    def __init__(self, name: str, level: str, group: Mapping[str, int | None] | None) -> None:
        """group: rank, world, port and listen of `collectives.Group`; None: it is alone."""
        self._name = name
        self._level = level
        self._meeting = group
        self.clock = Clock()
        """Of the parts of the step that is done now, and of what the driver did beside."""

    def torch(self) -> dict[str, float]:
        """Nothing of it makes a context on the device, but once it may."""
        self._driver = threading.Thread(target=self._open_driver, daemon=True, name="driver")
        self._driver.start()
        with self.clock.part("import"):
            import torch

            from elastic.agent.probes import bandwidth, collectives, copies, matmul

        self._torch = torch
        self._matmul = matmul
        self._product: matmul.Product | None = None
        self._probes = {p.__name__.rpartition(".")[2]: p for p in (bandwidth, copies)}
        self._collectives = collectives
        with self.clock.part("reckoned"):
            matmul.truth(matmul.SIZES[torch.device(self._name).type, self._level].n)
        return {"threads": float(torch.get_num_threads())}

    def _open_driver(self) -> None:
        """It opens for one process after the other, and makes their contexts so, which takes as long as an import of
        torch: beside that."""
        driver = None
        if self._name.startswith("cuda"):
            with contextlib.suppress(OSError), self.clock.part("driver"):  # torch will tell
                driver = ctypes.CDLL("libcuda.so.1")
                driver.cuInit(0)
        told = sys.stdin.readline().strip()
        if driver is not None and told == CONTEXT:
            with self.clock.part("driver's context"):  # of which torch has nothing to make any more
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)

    def steps(self) -> Iterator[str]:
        """What to do, one after the other."""
        yield "torch"
        self._driver.join()
        yield from map(str.strip, sys.stdin)

    def device(self) -> dict[str, float]:
        """A context on it, and the start of a meeting with its siblings."""
        version = self._torch.version
        if self._name.startswith("cuda") and version.cuda is None and version.hip is None:
            raise NotKnown("torch was built without CUDA, so that ranks use no GPU")
        with self.clock.part("context"):
            self._device = self._matmul.use(self._name)
        if self._meeting is not None:
            self._group = self._collectives.Group(self._device, **self._meeting)  # type: ignore[arg-type]
        with self.clock.part("sum"):
            return {"two": float(self._torch.ones(1, device=self._device) + 1)}

    def product(self) -> dict[str, float]:
        """All that a `matmul` needs, so that it takes no longer than what is measured."""
        self._product = self._matmul.product(self._device, self._level, self.clock)
        return {"n": float(self._product.first.shape[0])}

    def do(self, probe: str) -> dict[str, float]:
        """Raises Fault, NotKnown, and whatever a sick device raises."""
        if probe in ("torch", "device", "product"):
            return getattr(self, probe)()  # type: ignore[no-any-return]
        name = probe.removesuffix("_together")
        if name == "matmul":
            return self._matmul.measure(self._device, self._level, self._product)
        self._product = None
        if name == "collectives":
            return self._group.measure(self._level, self.clock)
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
    for probe in device.steps():
        answer = ask(probe, partial(device.do, probe))
        tell(answers, replace(answer, parts=device.clock.take()))


if __name__ == "__main__":
    main(sys.argv[1:])
