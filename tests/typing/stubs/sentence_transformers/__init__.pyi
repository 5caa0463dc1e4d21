# Everything is Any: pyright would read thousands of modules for half a minute.

from typing import Any

def __getattr__(name: str) -> Any: ...
