"""Synthetic checkpoints in the vendor's form: any shape, real names and metadata, several shards, planted sparsity.

    shapes     names of published models, how much of one, sizes changed -> a Form
    form       everything that decides the files but the random bits
    tensors    every tensor of a form in order, and how it is drawn (vision: the tower)
    balance    how strong the common direction is before each MoE layer, which plants the zeros
    draws      stored bytes straight from random bits (floats: their bit patterns)
    shards     files, headers, index;  metadata, small_files: the JSON beside them
    facts      what follows from the shape, and what was planted
    writer     drawing and writing, streaming

`write(folder, shape="super", moe_layers=1, settings={"n_routed_experts": 48}, seed=0)` does all of it.
"""

from nemolab.synthetic.form import Form, FormatTable
from nemolab.synthetic.shapes import SHAPES, make_form
from nemolab.synthetic.tensors import list_tensors
from nemolab.synthetic.writer import Written, write, write_form

__all__ = ["SHAPES", "Form", "FormatTable", "Written", "list_tensors", "make_form", "write", "write_form"]
