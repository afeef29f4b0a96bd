"""Models of a hub by name, downloaded by the hub's own library.

Key idea: a folder always wins, so what works without a network needs none of this; and a library is imported only when
a name asks for it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from megalite.config.errors import UserError
from megalite.data.tokenizer_base import first_line

_LIBRARIES = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}
_MIRRORS = {"huggingface": "HF_ENDPOINT sets a mirror, or try --hub modelscope", "modelscope": "try --hub huggingface"}
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_OTHER_FORMS = ["consolidated*", "original/*", "onnx/*", "openvino/*", "metal/*"]  # of the same weights
_CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/")  # where huggingface_hub keeps a model


def local_folder(name: str, hub: str) -> str:
    """The folder of a model: `name` itself where it is one, else where the library of `hub` put the model OWNER/NAME.

    A UserError where there is neither.
    """
    if Path(name).exists():
        return name
    if not _NAME.fullmatch(name):
        raise UserError(f"{name} is neither a folder here nor the name of a model on a hub (OWNER/NAME)")
    package = _LIBRARIES[hub]
    try:
        library = importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"{name} is not a folder here, and --hub {hub} needs the package {package}: pip install {package} ({error})"
        ) from None
    try:
        return str(library.snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_OTHER_FORMS))
    except Exception as error:  # whatever a network and its library may raise
        raise UserError(
            f"{name} is not a folder here, and can't be downloaded from {hub}: {first_line(error)} ({_MIRRORS[hub]}; "
            "or download it elsewhere and give the folder)"
        ) from None


def published_name(folder: str) -> str:
    """The hub's name of a folder in `huggingface_hub`'s cache; any other folder's path as it is."""
    found = _CACHED.search(f"{Path(folder).absolute()}/")
    return folder if found is None else f"{found[1]}/{found[2]}"
