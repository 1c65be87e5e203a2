"""kld: KL-family divergences and their gradients, from NumPy and PyTorch.

    import kld
    with kld.connect("unix:/run/kld/kld.sock") as connection:
        result = connection.kl_div(student, teacher, predictions_form="logits", targets_form="logits")
        result.loss, result.grad_predictions

kld.functional and kld.nn are PyTorch's side and need torch, which their first use imports; the rest needs NumPy only.
README.md says more.
"""
from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from ._connection import Connection, Result, ServerInfo
from ._default import default_connection
from ._errors import (KldBusyError, KldConnectionError, KldError, KldLookupError, KldMemoryError,
                      KldPermissionError, KldTimeoutError, KldTypeError, KldUnsupportedError, KldValueError,
                      Status)
from ._share import Attached, Published
from ._version import __version__


def connect(url: Union[str, Sequence[str], None] = None, *, token: Optional[str] = None, ca_file: Optional[str] = None,
            client_name: str = "python", connect_timeout: float = 5.0, threads: int = 0,
            staging_bytes_max: int = 0, cache_bytes_max: int = 4 << 30, part_bytes_max: int = 0,
            part_timeout: float = 60.0, cert_file: Optional[str] = None, key_file: Optional[str] = None) -> Connection:
    """Connects to "unix:PATH", "http://HOST:PORT", "https://HOST:PORT" or "local:" (the same kernels in this
    process; also "local:cpu"). Without a URL: the environment's KLD_SERVER, else "local:".

    A list of URLs (or "split:URL,URL") spreads the rows of each request over several servers of one kind and
    release: the result is that of one of them, bit for bit, and a part whose server is lost goes to another.
    part_bytes_max: tensor bytes of a part; 0: 64 MiB. part_timeout: seconds after which a part that was not
    done goes to another server.

    token: over HTTP, the bearer token. ca_file: over https, certificates to trust; else the system's.
    cert_file, key_file: over https, PEM files of a certificate to show and its key (else in cert_file, too).
    client_name: for the server's log. connect_timeout: seconds. threads: local:, on the CPU; 0: all.
    staging_bytes_max: unix:, most shared memory through which other arrays are copied; 0: 4 GiB. cache_bytes_max:
    most memory kept for results to come.
    """
    return Connection(url if url is not None else os.environ.get("KLD_SERVER") or "local:", token=token,
                      ca_file=ca_file, client_name=client_name, connect_timeout=connect_timeout,
                      threads=threads, staging_bytes_max=staging_bytes_max, cache_bytes_max=cache_bytes_max,
                      part_bytes_max=part_bytes_max, part_timeout=part_timeout, cert_file=cert_file,
                      key_file=key_file)


if TYPE_CHECKING:  # with every parameter's type
    kl_div = default_connection().kl_div
    empty = default_connection().empty
    publish = default_connection().publish
    attach = default_connection().attach
else:
    def kl_div(predictions: Any, targets: Any, **parameters: Any) -> Result:
        """Connection.kl_div() over the default connection: one a process, made at its first use from the
        environment's KLD_SERVER, else "local:"."""
        return default_connection().kl_div(predictions, targets, **parameters)

    def empty(shape: Any, dtype: Any = "float32") -> Any:
        """Connection.empty() over the default connection: a NumPy array that kld.kl_div() uses without a copy."""
        return default_connection().empty(shape, dtype)

    def publish(name: str, array: Any, form: str = "probs", **more: Any) -> Published:
        """Connection.publish() over the default connection, which lives as long as the process."""
        return default_connection().publish(name, array, form, **more)

    def attach(name: str, **more: Any) -> Attached:
        """Connection.attach() over the default connection."""
        return default_connection().attach(name, **more)


__all__ = ["Attached", "Connection", "KldBusyError", "KldConnectionError", "KldError", "KldLookupError",
           "KldMemoryError", "KldPermissionError", "KldTimeoutError", "KldTypeError", "KldUnsupportedError",
           "KldValueError", "Published", "Result", "ServerInfo", "Status", "__version__", "attach", "connect",
           "default_connection", "empty", "kl_div", "publish"]

if TYPE_CHECKING:
    from . import functional, nn
    from ._interface import DeviceArray
    __all__ += ["DeviceArray", "functional", "nn"]
else:
    def __getattr__(name: str) -> Any:
        """What is not imported before its first use: torch may be missing, and takes a second."""
        if name in ("functional", "nn"):
            return importlib.import_module(f"{__name__}.{name}")
        if name == "DeviceArray":
            return importlib.import_module(f"{__name__}._interface").DeviceArray
        raise AttributeError(f"module 'kld' has no attribute {name!r}")
