"""`python -m minitrain`: the same as `minitrain`, where the script is not on the PATH."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the folder where the user works: its random.py or click.py is none of ours

from minitrain_cli.main import main

main(prog_name="minitrain")
