"""The installed package: its version, and that no other project lies in its folder.

`batched` on PyPI is another project with the same import name. Whichever of the two is installed
later replaces files of the other. This file is none of them.
"""

import os
import sys

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
        "`pip install --force-reinstall batched-dynamically`"
    )
