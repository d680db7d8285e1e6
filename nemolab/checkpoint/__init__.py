"""Vendor checkpoints: opened, checked, listed, decoded. Importing this does not import torch."""

from nemolab.checkpoint.checkpoint import Checkpoint, ExpertBytes
from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.inventory import Inventory
from nemolab.checkpoint.modules import Module
from nemolab.checkpoint.safetensors_header import TensorEntry, read_header

__all__ = ["Checkpoint", "ExpertBytes", "Inventory", "Module", "ModelConfig", "TensorEntry", "read_header"]
