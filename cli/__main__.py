"""`python -m minitrain_cli`: the same as `minitrain`, where the script is not on the PATH."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the folder where the user works: its random.py or click.py is none of ours

from .main import main

main(prog_name="minitrain")
