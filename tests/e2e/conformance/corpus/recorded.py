"""The probe under torch's @record: a failure leaves an error file."""

import probe
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    probe.main(__name__, __file__)


if __name__ == "__main__":
    main()
