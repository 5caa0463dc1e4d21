"""The installed package: its version, its extras, and that no other project lies in its folder.

`batched` on PyPI is another project with the same import name. Whichever of the two is installed
later replaces files of the other. This file is none of them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__version__ = "0.1.0"

_FOLDER = os.path.dirname(__file__)

if (
    # in all releases of the other project
    os.path.exists(os.path.join(_FOLDER, "batch_processor.py"))
    # its removal takes `__init__.py` along
    or getattr(sys.modules["batched"], "__file__", None) is None
):
    raise ImportError(
        f"another project, PyPI's `batched`, was installed into {_FOLDER} too, so that files of "
        "batched-dynamically are replaced, hidden or missing; run `pip uninstall batched`, then "
        "install batched-dynamically again, with `--force-reinstall`"
    )


@contextmanager
def needs(user: str, extra: str) -> Iterator[None]:
    """Explain an import in the `with` block that fails because a package is not installed.

    Args:
        user: part of the library that imports the package, for the message.
        extra: extra of this distribution that installs the package.

    Raises:
        ModuleNotFoundError: a package is not installed; the message has the command to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise ModuleNotFoundError(
            f'{user} needs {package}, which is not installed; run `python -m pip install ".[{extra}'
            f']"` in a checkout of batched',
            name=error.name,
        ) from error
