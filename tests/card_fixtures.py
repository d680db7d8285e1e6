"""Fixtures of the tests of a card's engine, as a plugin: a small checkpoint, and a world for one MoE step."""

import pytest
from moe_worlds import World
from synthetic import write_checkpoint


@pytest.fixture(scope="session")
def small_path(tmp_path_factory):
    """A checkpoint of four layers that no test may change."""
    sizes = {"pattern": "ME*E", "experts": 6, "inter": 32, "latent": 32, "hidden": 32, "top_k": 2}
    return write_checkpoint(tmp_path_factory.mktemp("card") / "model", **sizes)


@pytest.fixture(params=["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request):
    """Blocks of three layers in page-locked memory, with their table."""
    found = World(request.param)
    yield found
    found.close()
