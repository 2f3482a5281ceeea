"""Rotary embedding against Hugging Face's modules, and its edges."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen_vl
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from fastlayers.errors import ArgumentError
from fastlayers.rotary import triton as rotary_triton
from fastlayers.rotary.layer import RotaryConfig, RotaryEmbedding
from fastlayers.rotary.scaling import RopeScaling, attention_scale, inverse_frequencies

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
POSITIONS = torch.tensor([0, 1, 5, 700, 4095, 9000, 16383])
LONGEST = 16384


def heads(count: int, dim: int) -> torch.Tensor:
    """Random heads in Hugging Face's layout ``[1, H, T, D]``."""
    return torch.randn(1, count, len(POSITIONS), dim)


def ours(
    rope: RotaryEmbedding, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor = POSITIONS
) -> list[torch.Tensor]:
    """Run our layer on Hugging Face's layout and return that layout."""
    rotated = rope(q[0].transpose(0, 1), k[0].transpose(0, 1), positions)
    return [x.transpose(0, 1)[None] for x in rotated if x is not None]


def assert_close(actual: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(actual) == len(expected) == 2
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


def v3_config(rope: dict[str, object] | None) -> DeepseekV3Config:
    return DeepseekV3Config(qk_rope_head_dim=64, max_position_embeddings=LONGEST, rope_parameters=rope)


@pytest.mark.parametrize("rope", [None, YARN, {**YARN, "mscale": 0.707}, {**YARN, "mscale": 0, "mscale_all_dim": 0}])
def test_deepseek_v3(rope: dict[str, object] | None) -> None:
    config = v3_config(rope and dict(rope))
    stock, q, k = v3.DeepseekV3RotaryEmbedding(config), heads(3, 64), heads(1, 64)
    mine = RotaryEmbedding.from_config(config, interleaved_in=True)
    cos, sin = stock(q, POSITIONS[None])
    assert torch.equal(mine.cos[POSITIONS], cos[0, :, :32])
    assert torch.equal(mine.sin[POSITIONS], sin[0, :, :32])
    assert_close(ours(mine, q, k), v3.apply_rotary_pos_emb_interleave(q, k, cos, sin))


def test_deepseek_v3_half_split() -> None:
    config = v3_config(None)
    stock, q, k = v3.DeepseekV3RotaryEmbedding(config), heads(3, 64), heads(1, 64)
    mine = RotaryEmbedding.from_config(config)
    assert_close(ours(mine, q, k), v3.apply_rotary_pos_emb(q, k, *stock(q, POSITIONS[None])))


@pytest.mark.parametrize("rope", [None, {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, {**YARN, "mscale": 0.5}])
def test_deepseek_v2_complex(rope: dict[str, object] | None) -> None:
    config = DeepseekV2Config(qk_rope_head_dim=64, max_position_embeddings=LONGEST, rope_parameters=rope and dict(rope))
    stock, q, k = v2.DeepseekV2RotaryEmbedding(config), heads(3, 64), heads(1, 64)
    mine = RotaryEmbedding.from_config(config, interleaved_in=True, interleaved_out=True)
    assert_close(ours(mine, q, k), v2.apply_rotary_emb(q, k, stock(q, POSITIONS[None])))


def test_v2_rounds_as_hugging_face_in_bf16() -> None:
    config = DeepseekV2Config(qk_rope_head_dim=64, max_position_embeddings=LONGEST)
    stock, q, k = v2.DeepseekV2RotaryEmbedding(config), heads(3, 64).bfloat16(), heads(1, 64).bfloat16()
    mine = RotaryEmbedding.from_config(config, interleaved_in=True, interleaved_out=True, backend="torch")
    expected = v2.apply_rotary_emb(q, k, stock(q, POSITIONS[None]))
    assert all(torch.equal(a, e) for a, e in zip(ours(mine, q, k), expected, strict=True))


@pytest.mark.parametrize("rope", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}])
def test_llama(rope: dict[str, object] | None) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        rope_parameters=rope and dict(rope),
    )
    stock, q, k = llama.LlamaRotaryEmbedding(config), heads(2, 128), heads(1, 128)
    mine = RotaryEmbedding.from_config(config)
    assert torch.equal(mine.cos[POSITIONS], stock(q, POSITIONS[None])[0][0, :, :64])
    assert_close(ours(mine, q, k), llama.apply_rotary_pos_emb(q, k, *stock(q, POSITIONS[None])))


def test_gpt_oss() -> None:
    config = GptOssConfig(max_position_embeddings=LONGEST)
    stock, q, k = gpt_oss.GptOssRotaryEmbedding(config), heads(4, 64), heads(1, 64)
    mine = RotaryEmbedding.from_config(config)
    assert mine.base == 150000.0
    assert not mine.scaling.truncate
    assert mine.scaling.table_factor == pytest.approx(1.34657, abs=1e-5)
    assert attention_scale(64, mine.scaling) == 64**-0.5
    assert_close(ours(mine, q, k), gpt_oss.apply_rotary_pos_emb(q, k, *stock(q, POSITIONS[None])))


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope(interleaved: bool) -> None:
    positions = torch.stack([POSITIONS, POSITIONS.flip(0) // 2, torch.arange(len(POSITIONS))])
    section = [24, 20, 20] if interleaved else [16, 24, 24]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": LONGEST,
    }
    q, k = heads(2, 128), heads(1, 128)
    if interleaved:
        config = Qwen3VLTextConfig(**sizes, rope_parameters={**rope, "mrope_interleaved": True})
        tables = qwen3_vl.Qwen3VLTextRotaryEmbedding(config)(q, positions[:, None])
    else:
        config = Qwen2_5_VLTextConfig(**sizes, rope_parameters=rope)
        tables = qwen_vl.Qwen2_5_VLRotaryEmbedding(config)(q, positions[:, None])
    mine = RotaryEmbedding.from_config(config, head_dim=128)
    expected = llama.apply_rotary_pos_emb(q, k, tables[0].reshape(1, -1, 128), tables[1].reshape(1, -1, 128))
    assert_close(ours(mine, q, k, positions), expected)


def test_mrope_of_text_is_plain_rope() -> None:
    scaling = RopeScaling(mrope_section=(4, 2, 2))
    mrope, plain = (RotaryEmbedding(16, scaling=s, max_position=32) for s in (scaling, None))
    q, k, positions = torch.randn(5, 2, 16), torch.randn(5, 1, 16), torch.tensor([3, 1, 4, 1, 31])
    expected = plain(q, k, positions)
    for given in (positions, positions.expand(3, -1)):
        assert all(torch.equal(a, b) for a, b in zip(mrope(q, k, given), expected, strict=True))


@pytest.mark.parametrize("rope", [YARN, {**YARN, "truncate": False, "factor": 32.0}, LLAMA3])
def test_frequencies_are_hugging_faces_bits(rope: dict[str, object]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config, "cpu")
    scaling = RopeScaling.from_config(config)
    assert torch.equal(inverse_frequencies(64, float(str(rope["rope_theta"])), scaling), expected)
    assert scaling.table_factor == factor


def test_table_against_fp64() -> None:
    rope = RotaryEmbedding(8, max_position=100)
    angles = torch.arange(100).double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(rope.cos.double(), angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(rope.sin.double(), angles.sin(), rtol=0, atol=1e-5)


def test_attention_scale_of_deepseek_v3() -> None:
    scaling = RopeScaling.from_config(v3_config(dict(YARN)))
    assert attention_scale(192, scaling) == pytest.approx(0.135234, abs=1e-6)
    assert scaling.table_factor == 1.0
    assert attention_scale(192, None) == attention_scale(192, RopeScaling()) == 192**-0.5


def test_attention_scale_is_that_of_the_stock_module() -> None:
    config = v3_config({**YARN, "mscale_all_dim": 0.707})
    expected = v3.yarn_apply_mscale(config.rope_parameters, 192**-0.5)
    assert attention_scale(192, RopeScaling.from_config(config)) == pytest.approx(expected, rel=1e-12)


def test_older_config_format() -> None:
    old = {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {**LLAMA3, "type": "llama3"},
    }
    new = RopeScaling.from_config({"max_position_embeddings": 131072, "rope_parameters": LLAMA3})
    assert RopeScaling.from_config(old) == new
    assert RopeScaling.from_config({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}).kind == "default"
    assert eval(repr(new)) == new


def test_config_as_mapping() -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(LLAMA3))
    given = config.to_dict()
    given.pop("head_dim", None)
    made, expected = RotaryEmbedding.from_config(given), RotaryEmbedding.from_config(config)
    assert (made.cfg, made.base, made.scaling) == (expected.cfg, expected.base, expected.scaling)
    assert made.max_position == config.max_position_embeddings


def test_one_set_per_layer_type() -> None:
    config = {
        "rope_parameters": {
            "full_attention": LLAMA3,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert RopeScaling.from_config(config, "full_attention").kind == "llama3"
    assert RopeScaling.from_config(config, "sliding_attention").kind == "default"


def test_of_both_keys_the_older_one_counts_as_in_transformers() -> None:
    both = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    }
    theirs = RotaryEmbedding.from_config(LlamaConfig.from_dict(dict(both)), head_dim=8)
    ours = RotaryEmbedding.from_config(both, head_dim=8)
    assert (ours.scaling, ours.base) == (theirs.scaling, theirs.base)
    assert ours.scaling.factor == 3.0


def test_partial_rotary_copies_the_rest() -> None:
    rope = RotaryEmbedding(16, rotary_dim=4, max_position=8)
    x = torch.randn(3, 2, 16)
    y, none = rope(x, None, torch.tensor([1, 2, 3]))
    assert none is None
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert not torch.equal(y[..., :4], x[..., :4])


def test_tables_stay_fp32_and_leave_meta() -> None:
    rope = RotaryEmbedding(8, max_position=16)
    cos = rope.cos.clone()
    assert rope.to(torch.bfloat16).cos.dtype == torch.float32
    assert torch.equal(rope.cos, cos)
    on_meta = RotaryEmbedding(8, max_position=16, device="meta", backend="torch").to_empty(device="cpu")
    assert torch.equal(on_meta.cos, cos)
    assert not rope.state_dict()


def _partial(factor: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}}


def test_configs_are_checked() -> None:
    for build, argument in (
        (lambda: RotaryConfig(8, 3), "rotary_dim"),
        (lambda: RotaryConfig(8, 10), "rotary_dim"),
        (lambda: RotaryConfig(8, 8, mrope_section=(1, 1, 1)), "mrope_section"),
        (lambda: RopeScaling("yarn", 2.0), "original_max_position"),
        (lambda: RopeScaling("linear", 0.0), "factor"),
        (lambda: RopeScaling("dynamic"), "kind"),
        (lambda: RopeScaling("llama3", 2.0, 8, high_freq_factor=1.0), "high_freq_factor"),
        (lambda: RopeScaling.from_config({"rope_parameters": {"rope_type": "longrope"}}), "rope_type"),
        (lambda: RopeScaling.from_config({"rope_parameters": {"rope_type": "yarn"}}), "factor"),
        (
            lambda: RopeScaling.from_config({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 64}),
            "factor",
        ),
        (lambda: RopeScaling.from_config({"rope_parameters": {"rope_type": "linear"}}), "factor"),
        # What would read as an embedding without scaling.
        (lambda: RopeScaling.from_config(LLAMA3), "config"),
        (lambda: RotaryEmbedding.from_config(dict(LLAMA3), head_dim=8, max_position=8), "config"),
        (lambda: RotaryEmbedding.from_config("llama", head_dim=8, max_position=8), "config"),
        (lambda: RotaryEmbedding.from_config(None, head_dim=8, max_position=8), "config"),
        # 0 is not what a silent config means.
        (lambda: RotaryEmbedding.from_config({"rope_theta": 0}, head_dim=8, max_position=8), "base"),
        (lambda: RotaryEmbedding.from_config(_partial(0.0), head_dim=8, max_position=8), "rotary_dim"),
        (lambda: RotaryEmbedding.from_config(_partial("0.5"), head_dim=8, max_position=8), "partial_rotary_factor"),
        (lambda: RopeScaling.from_config({"rope_parameters": {"full_attention": LLAMA3}}), "layer_type"),
        (lambda: RopeScaling.from_config({"rope_parameters": {"full_attention": LLAMA3}}, "full"), "layer_type"),
    ):
        with pytest.raises(ArgumentError) as caught:
            build()
        assert caught.value.argument == argument


def test_inputs_are_checked() -> None:
    rope = RotaryEmbedding(8, max_position=16)
    q, k, positions = torch.zeros(2, 3, 8), torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.long)
    for arguments, argument in (
        ((q[..., :4], k, positions), "q"),
        ((q.double(), k, positions), "q"),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, positions), "q"),
        ((q, k.half(), positions), "k"),
        ((q, k[:1], positions), "k"),
        ((q, k, positions.float()), "positions"),
        ((q, k, positions[:1]), "positions"),
        ((q, k, positions.expand(3, 2)), "positions"),
    ):
        with pytest.raises(ArgumentError) as caught:
            rope(*arguments)
        assert (caught.value.layer, caught.value.argument) == ("RotaryEmbedding", argument)


def test_positions_are_checked_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    rope, q = RotaryEmbedding(8, max_position=16), torch.zeros(2, 1, 8)
    assert rope(q, None, torch.tensor([0, 15]))[0].shape == q.shape
    for bad in ([0, 16], [-1, 0]):
        with pytest.raises(ArgumentError, match=r"0 to 15"):
            rope(q, None, torch.tensor(bad))


def test_triton_never_reads_outside_the_table() -> None:
    rope = RotaryEmbedding(8, max_position=16, backend="triton")
    q = torch.randn(2, 1, 8)
    kernel = rope.ladder.pick(2)  # the layer looks, on a CPU
    far, last = (kernel(q, None, rope.cos, rope.sin, torch.tensor(p))[0] for p in ([-5, 10**12], [0, 15]))
    assert torch.equal(far, last)


def test_traceable() -> None:
    rope = RotaryEmbedding(8, max_position=16, backend="torch")
    compiled = torch.compile(rope, backend="eager", fullgraph=True)
    q, k, positions = torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.tensor([1, 5])
    assert all(torch.equal(a, b) for a, b in zip(compiled(q, k, positions), rope(q, k, positions), strict=True))


@pytest.mark.parametrize("backend", ["auto", "torch", "reference", "triton"])
@pytest.mark.parametrize("bad", [[0, 16], [-1, 0]])
def test_positions_outside_the_table_are_named_on_a_cpu(backend: str, bad: list[int]) -> None:
    words = rf"RotaryEmbedding: positions is {min(bad)} to {max(bad)}; accepted: 0 to 15 \(max_position\)"
    plain = RotaryEmbedding(8, max_position=16, backend=backend)
    mrope = RotaryEmbedding(8, max_position=16, scaling=RopeScaling(mrope_section=(2, 1, 1)), backend=backend)
    for rope, positions in ((plain, torch.tensor(bad)), (mrope, torch.tensor([[0, 0], bad, [0, 0]]))):
        with pytest.raises(ArgumentError, match=words):
            rope(torch.zeros(2, 1, 8), None, positions)


@pytest.mark.parametrize(("dim", "section"), [(128, ()), (256, ()), (128, (16, 24, 24)), (96, ())])
def test_a_few_tokens_turn_as_among_many(dim: int, section: tuple[int, ...]) -> None:
    """Threads that read their own angles, and threads that share them, give the same bits."""
    rope = RotaryEmbedding(dim, max_position=64, backend="triton", scaling=RopeScaling(mrope_section=section))
    q, k = torch.randn(20, 5, dim).bfloat16(), torch.randn(20, 1, dim).bfloat16()
    positions = torch.randint(64, (3, 20) if section else (20,))
    many = rope(q, k, positions)
    few = [rope(q[at : at + 5], k[at : at + 5], positions[..., at : at + 5]) for at in range(0, 20, 5)]
    for found, pieces in zip(many, zip(*few, strict=True), strict=True):
        assert found is not None and torch.equal(found, torch.cat([x for x in pieces if x is not None]))
    assert not torch.equal(many[0], q)
    far = torch.tensor([-5, 63, 1 << 40, 0, 7]) if not section else positions[:, :5]
    triton_rows = rope.ladder.pick(5)
    turned = triton_rows(q[:5], k[:5], rope.cos, rope.sin, far)[0]
    near = far.clamp(0, 63)
    assert torch.equal(turned, triton_rows(q[:5], k[:5], rope.cos, rope.sin, near)[0])


@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_and_warps_of_a_program_change_no_bit(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = RotaryEmbedding(64, max_position=64, interleaved_in=interleaved, backend="triton")
    q, k, positions = torch.randn(3, 128, 64).bfloat16(), torch.randn(3, 1, 64).bfloat16(), torch.tensor([63, 0, 7])
    usual = rope(q, k, positions)
    assert not torch.equal(usual[0], q)
    asked = []
    for heads, warps in ((4, 1), (8, 1), (8, 2), (16, 4), (32, 2), (32, 8), (64, 16)):
        for tile in (False, True):

            def given(*what: int, program: tuple[int, int, bool] = (heads, warps, tile)) -> tuple[int, int, bool]:
                asked.append(what)
                return program

            monkeypatch.setattr(rotary_triton, "_program", given)
            for found, wanted in zip(rope(q, k, positions), usual, strict=True):
                assert found is not None and wanted is not None and torch.equal(found, wanted)
    assert set(asked) == {(3, 129, 32)}


@pytest.mark.parametrize(
    ("tokens", "heads", "angles_each", "program"),
    [
        # DeepSeek-V3's heads; a rank of two's; GPT-OSS's; Qwen3-8B's; as many heads of 128.
        (1, 129, 32, (8, 1, True)), (16, 129, 32, (8, 1, True)), (17, 129, 32, (32, 8, False)),
        (128, 129, 32, (32, 8, False)), (129, 129, 32, (32, 2, False)), (4096, 129, 32, (32, 2, False)),
        (16, 65, 32, (8, 2, False)), (64, 65, 32, (32, 2, False)), (16, 72, 32, (8, 2, False)),
        (16, 40, 64, (8, 2, True)), (64, 40, 64, (32, 2, False)), (16, 136, 64, (8, 2, True)),
    ],
)  # fmt: skip
def test_programs(tokens: int, heads: int, angles_each: int, program: tuple[int, int, bool]) -> None:
    assert rotary_triton._program(tokens, heads, angles_each) == program
