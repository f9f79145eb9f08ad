"""The command line. It parses options and chooses what is shown; each command's work is in a file of its own.

`main` is the program, `options` and `running` what its commands share; every other file is the command of that name.
"""

from hf_paged.cli.main import app

# In the order in which the help shows them.
from hf_paged.cli import demo, bench, soak, plan, doctor, kernels  # noqa: F401  # isort: skip

__all__ = ["app"]
