"""When a worker leaves its session for new files of TLS."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from motet.tls import TlsFiles

from data_plane.stream.renewal import LATE_SHARE, CertificateRenewal
from tests.fakes.authority import Authority, overwrite

CA = Authority()


class Rig:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        issued = CA.issue("gpu-1", lasts=datetime.timedelta(seconds=1000))
        self.cert, self.key = issued.write(directory, "worker")
        self.files = TlsFiles(CA.write(directory), self.cert, self.key)
        end_s = self.files.not_after_s()
        assert end_s is not None
        self.end_s, self.now_s = end_s, end_s - 1000
        self.renewal = CertificateRenewal(self.files, wall_clock=lambda: self.now_s)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_an_idle_worker_leaves_once_new_files_are_complete(rig: Rig) -> None:
    assert rig.renewal.reason(is_idle=True) is None
    new = CA.issue("gpu-1")
    overwrite(rig.cert, new.cert)  # and the key is the former one's
    assert rig.renewal.reason(is_idle=True) is None
    overwrite(rig.key, new.key)
    assert rig.renewal.reason(is_idle=False) is None
    assert rig.renewal.reason(is_idle=True) == "its certificate or authority was replaced"
    assert CertificateRenewal(rig.files).reason(is_idle=True) is None, "the next session has the new files"


def test_a_busy_worker_leaves_in_the_last_tenth_of_its_certificates_time(rig: Rig) -> None:
    CA.issue("gpu-1").write(rig.directory, "worker")
    rig.now_s = rig.end_s - 1000 * LATE_SHARE - 1
    assert rig.renewal.reason(is_idle=False) is None
    rig.now_s += 1
    assert rig.renewal.reason(is_idle=False) is not None


def test_a_worker_without_new_files_stays_to_the_end(rig: Rig) -> None:
    rig.now_s = rig.end_s + 1
    assert rig.renewal.reason(is_idle=True) is None and rig.renewal.reason(is_idle=False) is None


def test_a_worker_without_a_certificate_of_its_own_follows_its_authority(tmp_path: Path) -> None:
    ca = CA.write(tmp_path)
    renewal = CertificateRenewal(TlsFiles(ca))
    overwrite(ca, Authority().pem)
    assert renewal.reason(is_idle=False) is None and renewal.reason(is_idle=True) is not None
