"""Triton's interpreter must be asked for before triton is first imported, and other tests import it: so the tests of the
interpreted kernels run in a process of their own, started by `test_process.py`."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = [
        "test_process.py",
        "test_compile.py",
        "test_decode_compile.py",
        "test_reference.py",
        "test_decode_reference.py",
    ]
else:
    collect_ignore = ["test_interpreted.py", "test_decode_interpreted.py"]
