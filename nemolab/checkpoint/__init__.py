"""Vendor checkpoints: opened, checked, listed, decoded. Importing this does not import torch.

From a folder to modules, in the order it happens:
    config, layer_lists           config.json -> ModelConfig
    shards, safetensors_header    index and files -> where each tensor lies (reading, json_files below them)
    names                         stored names -> canonical names
    structure, modules            what the config promises, what the tensors are: one Module each, with its format
    foreign                       other people's quantised forms, by their names, to be refused as what they are
    quant_metadata                what the metadata claims, compared with that
    values                        what only the bytes can show: NaN, impossible factors, scales in another order
    checkpoint, inventory         all of it together: Checkpoint; as a table, every byte with its verdict: Inventory
    formats, torch_dtypes         what the bytes mean
"""

from nemolab.checkpoint.checkpoint import Checkpoint, ExpertBytes
from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.inventory import Inventory
from nemolab.checkpoint.modules import Module
from nemolab.checkpoint.safetensors_header import TensorEntry, read_header

__all__ = ["Checkpoint", "ExpertBytes", "Inventory", "Module", "ModelConfig", "TensorEntry", "read_header"]
