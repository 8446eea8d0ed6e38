"""Run the numeric tests as other CPUs would: `make test-cpus`.

    python tests/cpus.py                        all settings, 1 and 2 threads
    python tests/cpus.py avx2 mkl --threads 1   some of them
    python tests/cpus.py avx2 -- -x             the rest goes to pytest

Each setting makes this build of torch choose other kernels, and so round
otherwise: ATEN_CPU_CAPABILITY those of torch itself, ONEDNN_MAX_CPU_ISA those
of oneDNN (matrix products of packed weights) and MKL_CBWR those of MKL (all
other matrix products). MKL_ENABLE_INSTRUCTIONS changes nothing on an AMD CPU.
"""

import argparse
import os
import subprocess
import sys
import time

SETTINGS = {
    "plain": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "mkl": {"MKL_CBWR": "COMPATIBLE"},
}
"""Environment variables by the name of a setting."""


def run(setting: str, threads: int, options: list[str]) -> bool:
    """Run the tests once; whether all passed."""
    environment = os.environ | SETTINGS[setting]
    environment |= {
        "GRPO_LAB_TEST_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m"]
    command += ["numeric and not slow", *options]
    started = time.monotonic()
    passed = subprocess.run(command, env=environment).returncode == 0
    word = "passed" if passed else "FAILED"
    seconds = time.monotonic() - started
    print(f"{setting}, threads {threads}: {word}, {seconds:.0f} s", flush=True)
    return passed


def main(arguments: list[str]) -> int:
    """0 if the tests passed in every setting, else 1."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    chosen = parser.parse_args(arguments[:at])
    return not all(
        [
            run(setting, threads, arguments[at + 1 :])
            for setting in chosen.settings or SETTINGS
            for threads in chosen.threads
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
