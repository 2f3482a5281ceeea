"""The experts' configuration goes through their operator as a text, which is read and never run."""

from __future__ import annotations

import pytest

from fastlayers.moe.fused_moe.experts_operator import _config_of
from fastlayers.registry.spec import spec_of


@pytest.mark.parametrize("case", spec_of("fused_moe").cases, ids=lambda case: case.name)
def test_a_configuration_comes_back_from_its_text(case: object) -> None:
    assert _config_of(repr(case.cfg)) == case.cfg  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["print('run')", "__import__('os').getpid()", "torch.save", "[x for x in ()]"])
def test_nothing_in_a_text_is_run(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="malformed"):
        _config_of(f"FusedMoEConfig(hidden_size={value}, intermediate_size=8, num_experts=2, top_k=1)")
    assert capsys.readouterr().out == ""
