"""`python -m minitrain_cli`: the same as `minitrain`, where the script is not on the PATH."""

from .main import main

main(prog_name="minitrain")
