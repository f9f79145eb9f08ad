"""A check that the links inside the package are links.

`hf_paged/kernels` and `hf_paged/patches` are symbolic links in the repository. Git on Windows, unless told otherwise,
writes small text files in their place, and the import would fail later with a message that helps nobody.
"""

import os

_LINKS = ("kernels", "patches")


def check_layout(directory: str | os.PathLike[str] | None = None) -> None:
    """Raise ImportError if a linked folder of the package in `directory` (default: this one) is a regular file."""
    directory = os.path.dirname(__file__) if directory is None else directory
    for name in _LINKS:
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            raise ImportError(
                f"{path} is a regular file where a link to the folder ../{name} belongs: this copy of the repository "
                "was made without symbolic links. To mend it, in a shell that may create links (on Windows turn on "
                "Developer Mode), run in the repository:\n"
                "    git config core.symlinks true\n"
                "    git checkout -- hf_paged/kernels hf_paged/patches\n"
                "Or install the hf-paged wheel, which needs no links."
            )
