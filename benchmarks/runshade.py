"""The launcher of every node: ``runshade.py SCRIPT TRAIN_PATH… [flags]``, as ``shade run``. See ``--help``."""

import sys

from shade.launch.run import main

if __name__ == "__main__":
    sys.exit(main())
