"""How faults are judged: by the two commands that meet a stranger's checkpoint first, from the command line down."""

import contextlib
import io
from pathlib import Path

from nemolab.cli import main

# Small checkpoints in the forms the family is published in: mixed by layer, uniform without a latent, beside a tower.
FORMS = {
    "super": dict(kv_scales=True, mtp=True, pattern="MEM*E-"),
    "nano": dict(latent=None, shared="nvfp4", mamba="nvfp4", uniform=True, metadata="hf_quant"),
    "vl": dict(
        prefix="language_model.backbone.", shared="nvfp4", attention="fp8", head="fp8", vision="timm", mtp="nvfp4",
        layer_spelling="layer_types",
    ),
}  # fmt: skip


def run_cli(*words) -> tuple[int, str, str]:
    """One command line in this process: (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def assert_one_line(code: int, err: str, *words: str) -> str:
    """Exit code 1 and one line on stderr that holds `words`; "unexpected" would be a crash in disguise."""
    lines = [line for line in err.splitlines() if line.startswith("nemolab: ")]
    assert code == 1 and len(lines) == 1 and "Traceback" not in err and "nemolab: unexpected" not in err, (code, err)
    assert len(lines[0]) < 2000
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"
    return lines[0]


def assert_refused(folder: Path, *words: str, plan: bool = True) -> str:
    """`nemolab plan` and `nemolab repack` refuse a folder with one line that holds `words`; no store is left.

    plan  False: headers cannot show this fault, so `plan` must pass and `repack`, which reads the bytes, must not
    """
    code, _, err = run_cli("plan", folder)
    if plan:
        assert_one_line(code, err, *words)
    else:
        assert code == 0, err
    store = folder.parent / "store"
    code, _, err = run_cli("repack", folder, "--to", store)
    message = assert_one_line(code, err, *words)
    assert not (store / "manifest.json").exists()
    if plan:
        assert not store.exists()
    return message
