"""NumPy archives that are not what they promise are refused, and nothing in them is run."""

import os
import zipfile
from functools import partial

import numpy as np
import pytest
from foreign_traces import npy, routed_npz, zip_of
from spoiled_traces import DATA, EXPERTS, HONEST, packed, refuse_at

from nemolab.errors import TraceError
from nemolab.trace import open_trace


@pytest.fixture
def refuse(tmp_path):
    return partial(refuse_at, tmp_path / "trace.dat")


SPOILED_NPZ = {
    "another array": (zip_of("experts.npy", npy(HONEST, DATA)), r"holds 'routed_experts' not, but \['experts.npy'\]"),
    "an empty archive": (
        zip_of("a", b"")[-22:].replace(b"\x01\x00\x01\x00", b"\x00\x00\x00\x00"),
        "no whole NumPy|not, but",
    ),
    "a pytorch archive": (zip_of("archive/data.pkl", b"\x80\x02."), "PyTorch archive: it can run code and is not read"),
    "objects": (routed_npz(EXPERTS.astype(object)), "holds Python objects or records, which are not unpickled"),
    "records": (routed_npz(np.zeros((1, 1, 1), [("a", "i4")])), "holds Python objects or records"),
    "floats": (routed_npz(EXPERTS.astype(np.float32)), "is of type '<f4'; integers were expected"),
    "bools": (routed_npz(EXPERTS > 3), "is of type '|b1'; integers"),
    "texts": (routed_npz(EXPERTS.astype("U2")), "is of type '<U2'; integers"),
    "two axes": (routed_npz(EXPERTS[:, :, 0]), r"has shape .*7, 3.*; \(tokens, layers, top_k\)"),
    "four axes": (routed_npz(EXPERTS[None]), r"has shape .*1, 7, 3, 2"),
    "no token": (routed_npz(EXPERTS[:0]), r"has shape .*0, 3, 2.*each above 0"),
    "no rank": (routed_npz(EXPERTS[:, :, :0]), "each above 0"),
    "negative": (routed_npz(np.where(EXPERTS == 7, -1, EXPERTS)), "holds -1; experts are numbers from 0 up"),
    "huge": (routed_npz(EXPERTS.astype(np.uint64) + 2**63), "holds 92233720368547758.*; experts"),
    "a header that promises more": (
        packed(HONEST | {"shape": (8, 3, 2)}),
        r"\(8, 3, 2\) takes .* bytes with its header; the",
    ),
    "a header that promises less": (packed(HONEST | {"shape": (6, 3, 2)}), r"\(6, 3, 2\) takes"),
    "a header that promises terabytes": (packed(HONEST | {"shape": (10**9, 100, 100)}), "takes 20,000,000,000,"),
    "a shape beyond 64 bits": (packed(HONEST | {"shape": (2**62, 4, 4)}), "has shape .*4611686018427387904"),
    "a shape of endless digits": (packed(repr(HONEST).replace("7, 3", "7" * 500 + ", 3")), "takes|has shape"),
    "a negative shape": (packed(HONEST | {"shape": (-7, 3, 2)}), "type, order and shape were expected"),
    "code in the header": (
        packed("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (7, 3, 2)}"),
        "type, or",
    ),
    "no order": (packed("{'descr': '<i2', 'shape': (7, 3, 2), }"), "type, order and shape were expected"),
    "a long header": (packed(repr(HONEST) + " " * 70_000, version=2), "a header of .* the limit"),
    "a version from the future": (packed(HONEST, version=9), "begins .* a NumPy array was expected"),
    "no array": (zip_of("routed_experts.npy", b"words"), "no whole NumPy archive: .*ends early"),
    "no bytes": (zip_of("routed_experts.npy", b""), "no whole NumPy archive"),
    "packed as NumPy does not": (
        zip_of("routed_experts.npy", npy(HONEST, DATA), compression=zipfile.ZIP_BZIP2),
        "encrypted, or",
    ),
    "a bomb": (routed_npz(np.zeros((1000, 1000, 8), np.int64)), "would unpack from .* to 64,000,128 bytes"),
    "words after the magic": (b"PK\x03\x04" + b"words" * 20, "no whole NumPy archive"),
}


@pytest.mark.parametrize("name", SPOILED_NPZ)
def test_a_spoiled_archive_is_refused(refuse, name):
    refuse(*SPOILED_NPZ[name])


@pytest.mark.parametrize("compressed", [True, False])
def test_an_archive_cut_off_or_damaged_is_refused(refuse, compressed):
    whole = routed_npz(EXPERTS, compressed=compressed)
    for end in range(30, len(whole), 7):
        refuse(whole[:end], "no whole NumPy archive")
    place = whole.index(b"\x93NUMPY") + 100 if not compressed else 80
    refuse(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], "no whole NumPy archive|was expected|takes")


def test_an_archive_that_lies_about_a_member_s_size_is_refused(refuse):
    """The directory at the end of the archive says how large a member is; here it says other than it is."""
    whole = bytearray(routed_npz(EXPERTS))
    directory = whole.rindex(b"PK\x01\x02")
    for said in (1, 213, 1 << 20, (1 << 32) - 2):
        whole[directory + 24 : directory + 28] = said.to_bytes(4, "little")
        refuse(bytes(whole), "takes|would unpack|no whole NumPy")


def test_an_encrypted_archive_is_refused(refuse):
    whole = bytearray(routed_npz(EXPERTS))
    for place in (6, whole.rindex(b"PK\x01\x02") + 8):
        whole[place] |= 1
    refuse(bytes(whole), "is encrypted")


def test_nothing_in_an_archive_is_run(tmp_path):
    """A pickle that would leave a mark, as routed_experts and beside it."""
    import pickle

    mark = tmp_path / "mark"

    class Mark:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    with np.errstate(all="ignore"):
        np.savez(tmp_path / "inside.npz", routed_experts=np.array([[[Mark()]]], object))
        np.savez(tmp_path / "beside.npz", routed_experts=EXPERTS, other=np.array([Mark()], object))
    with pytest.raises(TraceError, match="not unpickled"):
        open_trace(tmp_path / "inside.npz")
    assert open_trace(tmp_path / "beside.npz").n_tokens == 7
    assert not mark.exists()
    pickle.loads(pickle.dumps(Mark()))
    assert mark.exists(), "the mark would have been left"
