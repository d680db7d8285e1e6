"""Faults of checkpoints, kind by kind: `plan` and `repack` refuse each in one line that names tensor, found, expected."""

import re

import pytest
from faults import FORMS, assert_refused
from patching import drop_tensor
from synthetic import copy_checkpoint

from nemolab.checkpoint import Checkpoint


def kinds_of(form):
    """One stored name of every kind: "...layers.*.mixer.experts.*.up_proj.weight" -> its last one."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as parent:
        checkpoint = Checkpoint.open(copy_checkpoint(Path(parent) / "model", **FORMS[form]))
    names = sorted(checkpoint.tensors[name].source_name for name in checkpoint.tensors)
    return {re.sub(r"\.\d+\.", ".*.", name): name for name in names}


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_tensor_of_any_kind_is_named(tmp_path, form):
    optional = ("input_scale", "k_scale", "v_scale", "vision_model", "mlp1", "mtp")
    for number, name in enumerate(kinds_of(form).values()):
        if any(part in name for part in optional):
            continue
        folder = copy_checkpoint(tmp_path / str(number) / "model", **FORMS[form])
        drop_tensor(folder, name)
        assert_refused(folder, name, "missing")
