# SPDX-License-Identifier: MIT
"""Makes up a device, "fakegpu", for `helpers.fake_gpu`: before any test, since autograd counts the devices only once."""

import pytest
import torch
from helpers import TINY, run
from torch.utils import backend_registration

if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    backend_registration._setup_privateuseone_for_python_backend("fakegpu")
    torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16]

torch.set_num_threads(1)  # the models of the tests are so small that a second thread costs time


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """One finished tiny run, to compare with."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(monkeypatch, *TINY, "--out", folder) == 0
    return folder
