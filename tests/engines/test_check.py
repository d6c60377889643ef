"""What the check of the engine says, in one line; integration/test_doctor.py runs the real one."""

from __future__ import annotations

import pytest

from inkling_backend.engines.sglang import check
from inkling_backend.errors import InklingError, UnsupportedError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InklingError("the engine did not load the plugin"), "the engine did not load the plugin"),
        (UnsupportedError("SGLang 9", ["too new"]), "SGLang 9 cannot be served by the inkling "),
        (ImportError("libcuda.so.1: not found"), "ImportError: libcuda.so.1: not found"),
    ],
)
def test_it_ends_with_the_reason(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(check, "offer", fail)
    with pytest.raises(SystemExit) as end:
        check.main()
    assert str(end.value.code).startswith(said)
    assert "\n" not in str(end.value.code)
    monkeypatch.setattr(check, "offer", lambda: None)
    check.main()
