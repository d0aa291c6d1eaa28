"""A control plane that comes back with another checkpoint: streams that it did not begin are not mixed with its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from motet import FailedPrecondition

from tests.e2e.harness import System
from tests.makers import make_checkpoint


def test_stream_is_not_continued_on_another_checkpoint(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "first", arch="llama", seed=1)
    second = make_checkpoint(tmp_path / "second", arch="llama", seed=2)
    with System(first, tmp_path) as system:
        system.start_hash_worker(flags=["--step-time-ms", "20"])
        client = system.client()
        fingerprint = client.status().model.fingerprint
        with client.generate([9, 8, 7], max_tokens=400, ignore_eos=True, timeout_s=120.0) as stream:
            next(stream)
            assert stream.started is not None and stream.started.model_fingerprint == fingerprint
            system.control_plane.kill()
            system.model_dir = second
            system.start_control_plane()
            with pytest.raises(FailedPrecondition, match="is not the model served here") as caught:
                list(stream)
        assert caught.value.reason == "PRECONDITION_FAILED"
        assert client.status().model.fingerprint != fingerprint
