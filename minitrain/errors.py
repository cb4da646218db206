"""What is the user's to mend, told apart from what is ours."""

from __future__ import annotations


class UserError(ValueError):
    """Something that cannot be done as asked: the message names the values and a fix.

    Every refusal of an option, a file, a layout or a model is one. Commands print it as one line
    and exit with 2; any other exception is a fault of minitrain's own.
    """
