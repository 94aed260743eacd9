"""How long ``import wavekit`` takes in a fresh interpreter without torch and transformers: the best of several.

    python benchmarks/import_time.py

The clock runs inside the child, around the import alone. The best counts: whatever else the machine does can only add.
"""

import argparse
import subprocess
import sys

LIMIT_SECONDS = 0.3
CHILD = """
import sys
from time import perf_counter
sys.modules["torch"] = sys.modules["transformers"] = None
start = perf_counter()
import wavekit
print(perf_counter() - start)
"""


def main() -> int:
    """Measure and print; exit code 1 where the best is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    command = [sys.executable, "-c", CHILD]
    times = sorted(float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(runs))
    print(
        f"import wavekit: best {1e3 * times[0]:.0f} ms, median {1e3 * times[runs // 2]:.0f} ms of {runs} runs", end=""
    )
    print(f" (limit {1e3 * LIMIT_SECONDS:.0f} ms)")
    return int(times[0] > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
