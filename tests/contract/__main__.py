"""python -m tests.contract: the table of docs/optimizers.md; on stderr what went wrong."""

import io
import sys
from contextlib import redirect_stdout

from tests.contract.probe import alone, table
from tests.contract.registry import CHECKS
from tests.contract.subjects import available, versions


def main() -> int:
    with redirect_stdout(io.StringIO()):  # what the processes said
        findings = alone(available())
    print("\n".join(table(findings)))
    print(f"\n({versions()})")
    for name, found in findings.items():
        for check, wrong in zip(CHECKS, found, strict=True):
            if wrong is not None:
                print(f"{name}: {check.sentence}: {wrong}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
