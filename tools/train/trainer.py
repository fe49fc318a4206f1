"""Trainer: the program of the capped process: `python -m tiermem.tools.train.trainer JOB --channel
FD`.

It imports torch only after it has named the phase "the imports", so that the launcher can say when
a cap killed it. training.py is the training itself, fine_tuning.py that of `tiermem sft`. Errors go
over the channel, and the launcher prints them. SIGINT before the first step ends the process at
once; later SIGINT lets the present step finish.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
import warnings
from pathlib import Path

from tiermem.tools.job.launcher import Channel, Job
from tiermem.tools.record.run_record import OutOfDeviceMemory
from tiermem.tools.words import EXIT_FAILED, EXIT_USER, Stop, handling


def main(arguments: list[str] | None = None) -> int:
    """Runs one job; the exit status is 0, EXIT_USER for what the user must change, EXIT_FAILED for
    the rest."""
    parser = argparse.ArgumentParser(prog="tiermem.tools.train.trainer")
    parser.add_argument("job", type=Path)
    parser.add_argument("--channel", type=int)
    given = parser.parse_args(arguments)
    channel = Channel(given.channel)
    stop = Stop()
    try:
        with handling({signal.SIGINT: stop.on_interrupt}):
            channel.phase("the imports")
            warnings.filterwarnings("ignore", module="torch.*")
            job = Job.load(given.job)
            if job.sft:
                from tiermem.tools.train.fine_tuning import fine_tune

                fine_tune(job, channel, stop)
            else:
                from tiermem.tools.train.training import Trainer

                Trainer(job, channel, stop).run()
    except KeyboardInterrupt:
        channel.send("interrupted")
    except BrokenPipeError:
        return EXIT_FAILED  # the launcher is gone
    except Exception as error:
        channel.send(
            "error",
            type=type(error).__name__,
            message=str(error),
            instead=getattr(error, "instead", {}),
            trace=traceback.format_exc(),
        )
        return (
            EXIT_USER
            if isinstance(error, (ValueError, OSError, OutOfDeviceMemory))
            else EXIT_FAILED
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
