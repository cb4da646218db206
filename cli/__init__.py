"""The command line of minitrain; installed as the package minitrain_cli."""
