"""A rank that `autopar run` started, as `python -P PATH/launched.py PID ARGUMENTS`: it ends with its launcher.

The launcher ends its ranks; one that is killed cannot. So each rank looks whether its parent is still the launcher.

The file is started by its path and imports the autopar that it lies in, which is the launcher's. By name, a rank could
find another one (a checkout in the folder where the user stands, while an installed one launches), or none (a checkout
that is not installed).
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PERIOD_S = 0.5


def end_with(launcher: int) -> None:
    """End this process, whatever it waits for, soon after the process `launcher` that started it is gone."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(PERIOD_S)
        os.write(2, b"autopar: the launcher is gone; this rank ends.\n")
        os._exit(1)

    threading.Thread(target=watch, name="autopar-launcher", daemon=True).start()


def import_own_package() -> None:
    """Import the package autopar that this file lies in, wherever else one could be found."""
    spec = spec_from_file_location("autopar", Path(__file__).resolve().parents[1] / "__init__.py")
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    package = module_from_spec(spec)
    sys.modules["autopar"] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Run the command line as a rank."""
    launcher = int(sys.argv.pop(1))
    end_with(launcher)
    # Python would raise KeyboardInterrupt when a collective returns, which may be never.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what is imported stays: Python would look through it for garbage some 100 times, for half a second
    from autopar.cli.commands import main as command
    from autopar.cli.launch import stand_ready

    gc.freeze()
    gc.enable()
    stand_ready()
    try:
        command()
    except SystemExit as left:
        leave(left.code)


def leave(code: object) -> None:
    """End the process without taking Python apart: a thread of Gloo that frees a tensor meanwhile would abort it."""
    atexit._run_exitfuncs()  # what users and libraries asked for
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    import_own_package()
    main()
