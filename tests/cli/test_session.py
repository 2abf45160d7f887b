"""What a command makes ready before the first token."""

import jax
import pytest

from jaxengine.cli.session import USUAL_TOKENS, keep_programs, pool_tokens
from jaxengine.model import load_model
from jaxengine.text import Tokenizer
from tests.cli.conftest import ROOT


@pytest.fixture
def cache_setting():
    """JAX's place for compiled programs, put back afterwards."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("told", [None, "/somewhere/else"])
def test_N3_programs_are_kept_in_the_users_cache_unless_jax_was_told_a_place(
    cache_setting, told, monkeypatch, tmp_path
):
    monkeypatch.setenv("JAXENGINE_CACHE", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", told)
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == (told or str(tmp_path / "programs"))


def test_pool_sizes_are_few_and_within_the_model(tiny):
    """The usual size or a doubling of it, so that programs are found again, and never above the model's limit."""
    model = load_model(tiny)
    assert pool_tokens(model, 10) == model.config.max_length < USUAL_TOKENS


@pytest.mark.parametrize(
    ("wanted", "tokens"), [(1, 4096), (4096, 4096), (4097, 8192), (9000, 16384), (99999, 20000)]
)
def test_a_long_session_gets_a_larger_pool(wanted, tokens):
    class Config:
        max_length = 20000

    class Model:
        config = Config

    assert pool_tokens(Model, wanted) == tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_S1_every_fixture_folder_has_a_tokenizer_that_fits_its_logits(family):
    model = load_model(ROOT / "tests" / "fixtures" / "models" / "cpu-int4" / family)
    Tokenizer.from_folder(model.path).require_fits(model.decoder.vocab_size)
